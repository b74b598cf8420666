"""Messages of the topic `<prefix>.dead`: what people and tools should know of. At least once; a set by `key`."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.prompts import Prompt, SourceRef


class DeadLetter(msgspec.Struct, tag="dead.v1", frozen=True, kw_only=True, omit_defaults=True):
    """One refused record (stage ingest) or failed prompt (stage generator). `record` is the raw input, maybe cut."""

    stage: Literal["ingest", "generator", "sink"]
    reason: str
    detail: str
    source: str | None = None
    source_ref: SourceRef | None = None
    id: bytes | None = None
    prompt: Prompt | None = None
    record: str | None = None
    created_at: float
