"""Settings of the sink."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from services.kernel.settings import Settings

_MIB = 1024 * 1024


class SinkSettings(Settings, frozen=True, kw_only=True):
    """Where shards go and when one is closed: at the first limit it reaches."""

    PREFIX: ClassVar[str] = "TOKENHAUL_SINK_"

    root: Annotated[
        str, Meta(min_length=1, description="where the dataset is written under: a directory or s3://bucket/prefix")
    ]
    max_rows: Annotated[int, Meta(ge=1, description="rows and failures of a shard, at most about")] = 5000
    # In memory a token takes 4 bytes, on disk about 1.1: 256 MiB make a file of some 70 MB, large enough to be read
    # at full speed and small enough to be built in memory. Offsets of Arrow's strings and lists end at 2 GiB.
    max_bytes: Annotated[
        int, Meta(ge=_MIB, le=1024 * _MIB, description="bytes of a shard in memory (about), before it is compressed")
    ] = 256 * _MIB
    max_age_seconds: Annotated[
        float, Meta(gt=0, description="a record waits no longer than this for its shard to be committed")
    ] = 300.0
    buffer_bytes: Annotated[
        int,
        Meta(ge=_MIB, description="bytes of all open shards of a process (about); when full, the largest is committed"),
    ] = 512 * _MIB
    on_gap: Annotated[
        Literal["stop", "continue"],
        Meta(description="what to do when records were deleted from the sequences topic before they were committed"),
    ] = "stop"
