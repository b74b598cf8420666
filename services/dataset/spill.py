"""A shuffle on disk: rows go to buckets by their keys, then one bucket after the other is sorted in memory.

    .export/spill/00003-00000000000000005000-0.arrow     the rows of one row group, a record batch for each bucket

The files are whole or not there, so that an export that was interrupted goes on with what it has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from services.dataset.stats import Stats

KEY = "_key"
_BUCKETS, _STATS = b"buckets", b"stats"


def write(path: Path, table: pa.Table, keys: NDArray[np.uint64], buckets: NDArray[np.int64], stats: Stats) -> None:
    """Keep rows and what was counted of them. `keys` and `buckets` have one entry for each row."""
    order = np.argsort(buckets, kind="stable")
    table = table.append_column(KEY, pa.array(keys)).take(order)
    present, starts = np.unique(buckets[order], return_index=True)
    described = {
        _BUCKETS: msgspec.json.encode(present.tolist()),
        _STATS: msgspec.json.encode(stats),
    }
    schema = table.schema.with_metadata(described)
    temporary = path.with_suffix(".tmp")
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for start, end in zip(starts.tolist(), [*starts.tolist()[1:], len(table)], strict=True):
            piece = table.slice(start, end - start).combine_chunks()
            batches = piece.to_batches()
            assert len(batches) == 1, "combined chunks are one batch"
            writer.write_batch(batches[0].replace_schema_metadata(described))
    os.replace(temporary, path)


class Spilled:
    """What lies in a folder of spill files."""

    def __init__(self, folder: Path) -> None:
        self.stats = Stats()
        self._where: dict[int, list[tuple[Path, int]]] = {}
        for path in sorted(folder.glob("*.arrow")):
            with pa.OSFile(str(path), "rb") as source:
                described: dict[bytes, bytes] = pa.ipc.open_file(source).schema.metadata or {}
            self.stats.merge(msgspec.json.decode(described[_STATS], type=Stats))
            for number, bucket in enumerate(msgspec.json.decode(described[_BUCKETS], type=list[int])):
                self._where.setdefault(bucket, []).append((path, number))

    def __contains__(self, bucket: int) -> bool:
        return bucket in self._where

    def bucket(self, number: int) -> pa.Table:
        """The rows of a bucket, in the order of their keys."""
        table = pa.Table.from_batches(list(self._batches(number)))
        order = pc.sort_indices(table, sort_keys=[(KEY, "ascending"), ("id", "ascending")])
        return table.take(order).drop_columns([KEY])

    def _batches(self, number: int) -> Iterator[Any]:
        for path, place in self._where[number]:
            with pa.OSFile(str(path), "rb") as source:
                yield pa.ipc.open_file(source).get_batch(place).replace_schema_metadata(None)
