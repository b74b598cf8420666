"""Messages of the topic `<prefix>.control` (compacted): what all services of a dataset must agree on."""

from __future__ import annotations

import msgspec

DATASET_KEY = b"dataset"


class Dataset(msgspec.Struct, tag="dataset.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Frozen by `tokenhaul topics create`: records of one id meet in one partition only while these stay."""

    name: str
    model: str
    partitions: int
    created_at: float


class SourceTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ingest did with a source since its beginning: records published, already there, refused by reason."""

    published: int = 0
    repeated: int = 0
    refused: dict[str, int] = {}


class Idle(msgspec.Struct, tag="idle.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Ingest of run `run` has published all its sources hold: nothing follows until somebody starts it again."""

    run: str
    sources: dict[str, SourceTotals]
    created_at: float


Control = Dataset | Idle


def idle_key(run: str) -> bytes:
    """The key of a run's idle mark."""
    return f"idle/{run}".encode()
