"""Settings of the generator."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from services.kernel.settings import Settings


class GeneratorSettings(Settings, frozen=True, kw_only=True):
    """Engines and how they are asked."""

    PREFIX: ClassVar[str] = "TOKENHAUL_GENERATOR_"

    engines: Annotated[list[str], Meta(min_length=1, description="base URLs of SGLang servers")]
    window: Annotated[int, Meta(ge=1, description="requests in flight per engine")] = 64
    attempts: Annotated[
        int, Meta(ge=1, description="attempts on a healthy engine before a prompt fails as retries_exhausted")
    ] = 8
    request_seconds: Annotated[
        float, Meta(gt=0, description="how long a request may take, whatever it asks for (queue and prefill)")
    ] = 600.0
    token_seconds: Annotated[
        float, Meta(gt=0, description="how much longer it may take for each token of max_new_tokens")
    ] = 0.5
    from_start: Annotated[
        bool,
        Meta(
            description="begin at the first prompt although outcomes exist and the group has no offsets: "
            "everything is generated, and paid for, again"
        ),
    ] = False
