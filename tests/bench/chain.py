"""What grows with a dataset: memory of the index of seen ids, and the time to read a long chain again.

python -m tests.bench.chain            1, 10 and 50 M ids; 10,000 shards
"""

from __future__ import annotations

import resource
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from services.kernel.seen import SeenIds
from services.kernel.store import Data, LocalStore
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim, folder, starts
from tests.bench.table import Line, machine, show, write
from tests.support.outcomes import DATASET, fill, make_sequence, numbers_in

MILLIONS = (1, 10, 50)
SHARDS = 10_000
ROWS = 1
_AT_ONCE = 50_000


def index(millions: int) -> list[Line]:
    """Bytes an id in memory, standing and at most while it grew, and how fast ids are added."""
    # A process of its own: the peak of this one has been higher already.
    with get_context("spawn").Pool(1) as pool:
        standing, peak, added = pool.apply(_index, (millions * 1_000_000,))
    name = f"seen index, {millions} M ids"
    return [
        Line(name=f"{name}: memory", value=standing, unit="bytes/id", at_most=24),
        Line(name=f"{name}: most while it grew", value=peak, unit="bytes/id"),
        Line(name=f"{name}: added", value=added / 1e6, unit="M/s of CPU"),
    ]


def _index(count: int) -> tuple[float, float, float]:
    random = np.random.default_rng(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = SeenIds()
    began = time.process_time()
    for _ in range(count // _AT_ONCE):
        seen.add(random.integers(0, 2**64, (_AT_ONCE, 2), np.uint64))
    added = count / (time.process_time() - began)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / count
    return seen.nbytes / count, peak, added


class _Unsynced(LocalStore):
    """Does not wait for the disk: only reading is measured."""

    def create(self, key: str, data: Data) -> bool:
        path = Path(self.name(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return True


def chain(shards: int) -> list[Line]:
    """A chain of `shards` small shards in a directory: to list it, to read it again, to see that nothing is new."""
    with tempfile.TemporaryDirectory() as root:
        store = _Unsynced(Path(root))
        claim(store, DATASET)
        writer = Chain(store, DATASET, 0, "writer")
        sequences = [make_sequence(number) for number in numbers_in(0, shards * ROWS)]
        began = time.process_time()
        for number in range(shards):
            rows = sequences[number * ROWS : (number + 1) * ROWS]
            writer.commit(fill(Buffer(writer.tail, writer.last_id), writer, rows))
        written = time.process_time() - began
        began = time.process_time()
        starts(store.list(f"{DATASET.name}/{folder(0)}"))
        listed = time.process_time() - began
        reader = Chain(store, DATASET, 0, "reader")
        began = time.process_time()
        reader.refresh()
        rebuilt = time.process_time() - began
        assert (reader.tail, len(reader.seen.rows)) == (writer.tail, len(writer.seen.rows))
        began = time.process_time()
        reader.refresh()
        again = time.process_time() - began
    name = f"chain of {shards} shards of {ROWS} rows"
    return [
        Line(name=f"{name}: commit", value=written / shards * 1000, unit="ms CPU a shard"),
        Line(name=f"{name}: list", value=listed * 1000, unit="ms CPU"),
        Line(name=f"{name}: assign (read it all)", value=rebuilt, unit="s CPU"),
        Line(name=f"{name}: assign again, nothing new", value=again * 1000, unit="ms CPU"),
    ]


if __name__ == "__main__":
    lines = [line for millions in MILLIONS for line in index(millions)]
    lines += [line for shards in (SHARDS // 10, SHARDS) for line in chain(shards)]
    show(lines, "what grows with a dataset")
    write(lines, machine(), Path("out/bench-chain.json"))
