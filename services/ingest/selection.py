"""Which records belong to a sample: decided by their bytes and a seed, never by when or where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from services.ingest.lines import Line
from services.ingest.sources import Sample


def selected(sample: Sample | None, lines: Sequence[Line]) -> list[Line]:
    """The lines of the sample; all without one."""
    if sample is None or sample.fraction == 1:
        return list(lines)
    key, bound = sample.seed.to_bytes(8, "big"), int(sample.fraction * 2**64)
    return [line for line in lines if _number(key, line.data) < bound]


def fingerprint(sample: Sample | None) -> bytes:
    """What a cursor keeps, so that another sample is noticed: nothing for all records."""
    return blake2b(msgspec.msgpack.encode(sample), digest_size=16).digest() if sample else b""


def _number(key: bytes, data: bytes) -> int:
    return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "big")
