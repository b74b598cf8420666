"""Record ids, request ids, seeds and partitions: pure functions of what is asked, never of the answer.

An id is the blake2b-128 of the canonical msgpack of what identifies a request: maps sorted by key, numbers of
the sampling as float64, absent (None) values left out. tests/golden/ids.json pins the values; changing one
would make every record of every dataset a new record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

ID_BYTES = 16
_canonical = msgspec.msgpack.Encoder(order="sorted")


def record_id(
    prompt_ids: Sequence[int], model: str, sampling: Mapping[str, Any], sample_index: int, revision: int
) -> bytes:
    """The id of one row to be: 16 bytes. `sampling` is the resolved sampling without its seed."""
    return _digest((prompt_ids, model, _normal(sampling), sample_index, revision))


def request_id(prompt_ids: Sequence[int], model: str, sample_index: int) -> bytes:
    """What stays the same over revisions of a request: 16 bytes. Readers keep its highest revision."""
    return _digest((prompt_ids, model, sample_index))


def prompt_id(prompt_ids: Sequence[int]) -> bytes:
    """The id of the prompt alone: 16 bytes. Equal for all samples, models and revisions of one prompt."""
    return _digest(prompt_ids)


def origin_id(topic: str, partition: int, offset: int) -> bytes:
    """A stand-in id (16 bytes) for a record that cannot be read and carries no id of its own."""
    return _digest((topic, partition, offset))


def partition(id: bytes, partitions: int) -> int:
    """The one partition where every copy of a record meets: id, read as a big-endian number, modulo P."""
    return int.from_bytes(id, "big") % partitions


def seed(id: bytes) -> int:
    """The sampling seed of a record, in [0, 2^31)."""
    return int.from_bytes(id[:4], "big") & 0x7FFF_FFFF


def _digest(value: Any) -> bytes:
    return blake2b(_canonical.encode(value), digest_size=ID_BYTES).digest()


def _normal(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence):
        return [_normal(item) for item in value]
    raise TypeError(f"sampling cannot hold a {type(value).__name__}: {value!r}")
