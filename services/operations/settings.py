"""Where `tokenhaul status` finds the services."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from services.kernel.settings import Settings


class StatusSettings(Settings, frozen=True, kw_only=True):
    """What it asks beside Kafka."""

    PREFIX: ClassVar[str] = "TOKENHAUL_STATUS_"

    metrics: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^\s/]+:\d{1,5}$")]],
        Meta(
            description="where the services answer /metrics, as host:port; a name may stand for many addresses: for "
            "engines, tokens/s and what is done"
        ),
    ] = msgspec.field(default_factory=list)
