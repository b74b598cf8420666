"""The shards of a partition, each named by where the one before it ends.

    <dataset>/partition=00007/00000000000000000000.parquet      start 0, end 5000
    <dataset>/partition=00007/00000000000000005000.parquet      start 5000, end 9321
                                                                the tail is 9321

Creating the next name is the commit. A name can be created once, so every shard has one successor: whatever the number
of writers, shards tile [0, tail) with no hole and no overlap. Who creates it proves that it knew all shards before, so
no id comes twice.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from schemas.control import Dataset
from services.kernel.errors import Fatal
from services.kernel.seen import Ids, pack
from services.kernel.store import Store
from services.kernel.topics import is_directory_name
from services.sink import parquet
from services.sink.ahead import ahead
from services.sink.buffer import Buffer, Seen
from services.sink.parquet import DamagedShard, Footer

DATASET_FILE = "_dataset.json"
_BATCH_IDS = 1 << 20
_READERS = 16  # on an object store a shard is three requests, each of which waits tens of milliseconds
SHARD = re.compile(r"(\d{20})\.parquet")


def folder(partition: int) -> str:
    """The directory of a partition's shards, in the dataset's."""
    return f"partition={partition:05d}"


def shard_name(start: int) -> str:
    """The file name of the shard that begins at offset `start`."""
    return f"{start:020d}.parquet"


def join(folder: str, name: str) -> str:
    """The key of `name` in `folder`; either may be empty."""
    return f"{folder}/{name}".strip("/")


def starts(names: Iterable[str]) -> list[int]:
    """Where the shards among `names` begin, ascending."""
    return sorted(int(match[1]) for match in map(SHARD.fullmatch, names) if match)


def claim(store: Store, dataset: Dataset) -> None:
    """Write `_dataset.json` if nobody has. Raises Fatal when another dataset lives there."""
    if not is_directory_name(dataset.name):
        raise Fatal(f"dataset {dataset.name!r} cannot be a directory: its name is empty, has a / or begins with . or _")
    key = f"{dataset.name}/{DATASET_FILE}"
    if store.create(key, msgspec.json.encode(dataset)):
        return
    with store.open(key) as file:
        present = read_dataset(file, store.name(key))
    for field in ("name", "model", "partitions"):
        if getattr(present, field) != getattr(dataset, field):
            raise Fatal(
                f"{store.name(key)} says {field} {getattr(present, field)!r}, the topics say "
                f"{getattr(dataset, field)!r}: another dataset needs another name or another TOKENHAUL_SINK_ROOT"
            )


def read_dataset(file: BinaryIO, name: str) -> Dataset:
    """What `_dataset.json` holds. Raises Fatal when it is not that."""
    try:
        return msgspec.json.decode(file.read(), type=Dataset)
    except msgspec.DecodeError as error:
        raise Fatal(f"{name} does not describe a dataset: {error}") from error


def find(store: Store) -> tuple[str, Dataset]:
    """The dataset in the root of `store`, or in the one directory right under it that holds one: its directory ("" is
    the root) and description. Raises Fatal when there is none, or more than one, and Retry."""
    names = store.list("")
    here = [""] if DATASET_FILE in names else [name for name in names if DATASET_FILE in store.list(name)]
    if not here:
        raise Fatal(f"{store.name('')} is no dataset: there is no {DATASET_FILE} in it or right under it")
    if len(here) > 1:
        raise Fatal(f"{store.name('')} holds {len(here)} datasets, name one: {', '.join(here)}")
    key = join(here[0], DATASET_FILE)
    with store.open(key) as file:
        return here[0], read_dataset(file, store.name(key))


class _Link(NamedTuple):
    """A shard, read."""

    name: str
    footer: Footer
    rows: Ids
    failures: Ids
    last_id: bytes | None


class Chain:
    """A partition's shards as far as this writer knows them. All calls block; threads take turns."""

    def __init__(self, store: Store, dataset: Dataset, partition: int, writer: str) -> None:
        self._store, self._dataset, self._partition, self._writer = store, dataset, partition, writer
        self._folder = f"{dataset.name}/{folder(partition)}"
        self._lock = threading.Lock()
        self.tail = 0
        self.last_id: bytes | None = None
        self.seen = Seen()
        self.outcomes: Counter[str] = Counter()
        """Records that have an outcome here, by source."""

    def refresh(self) -> None:
        """Read the shards from the tail on: the whole chain at first, later what others added. Raises Fatal for a chain
        that is not whole and Retry when the store does not answer."""
        with self._lock:
            new = [start for start in starts(self._store.list(self._folder)) if start >= self.tail]
            rows: list[Ids] = []  # of many shards together: the index is filled faster by few large batches
            try:
                for link in ahead(self._read, new, _READERS):
                    self._append(link)
                    rows.append(link.rows)
                    if sum(map(len, rows)) > _BATCH_IDS:
                        self.seen.rows.add(np.concatenate(rows))
                        rows.clear()
            finally:  # the tail has moved beyond them
                if rows:
                    self.seen.rows.add(np.concatenate(rows))

    def commit(self, buffer: Buffer) -> int | None:
        """Make `buffer`, which begins at the tail, the next shard; return its bytes. None: another writer was first.
        Raises Retry when it is unknown what became of it: then `refresh` or the next `commit` will tell."""
        with self._lock:
            data = parquet.encode(buffer.rows, self._footer(buffer))
            if not self._store.create(f"{self._folder}/{shard_name(buffer.start)}", data):
                return None
            self._advance(buffer.end, buffer.last_id)
            self.outcomes = self.outcomes + buffer.sources  # made anew: the metrics read it from another thread
            self.seen.rows.add(pack([bytes.fromhex(row.id) for row in buffer.rows]))
            self.seen.failures.add(pack([id for id, _ in buffer.failures]))
            return len(data)

    def _advance(self, end: int, last_id: bytes | None) -> None:
        self.tail, self.last_id = end, last_id

    def _read(self, start: int) -> _Link:
        """The shard that begins there. Changes nothing: several are read at once."""
        key = f"{self._folder}/{shard_name(start)}"
        name = self._store.name(key)
        with self._store.open(key) as file:
            shard, footer = parquet.open_shard(file, name)
            self._check(footer, start, name)
            with parquet.damage_named(name):
                rows = parquet.row_ids(shard)
                failures = pack([bytes.fromhex(id) for id, _ in footer.failures])
                last_id = bytes.fromhex(footer.last_id) if footer.last_id else None
        if len(rows) != footer.rows:
            raise DamagedShard(f"{name} has {len(rows)} rows, its footer says {footer.rows}")
        return _Link(name, footer, rows, failures, last_id)

    def _append(self, link: _Link) -> None:
        """Move the tail over a shard; the ids of its rows are yet to be added."""
        if link.footer.start != self.tail:
            raise Fatal(f"{link.name} begins at {link.footer.start}, but the shards before it end at {self.tail}")
        self.seen.failures.add(link.failures)
        self._advance(link.footer.end, link.last_id)
        self.outcomes = self.outcomes + Counter(link.footer.sources)

    def _check(self, footer: Footer, start: int, name: str) -> None:
        expected = {
            "dataset": self._dataset.name,
            "model": self._dataset.model,
            "partitions": self._dataset.partitions,
            "partition": self._partition,
            "start": start,
        }
        for field, value in expected.items():
            if getattr(footer, field) != value:
                raise Fatal(f"{name} says {field} {getattr(footer, field)!r} in its footer, it must be {value!r}")
        if footer.end <= start:
            raise Fatal(f"{name} ends at {footer.end}, not after its start")

    def _footer(self, buffer: Buffer) -> Footer:
        return Footer(
            dataset=self._dataset.name,
            model=self._dataset.model,
            partition=self._partition,
            partitions=self._dataset.partitions,
            start=buffer.start,
            end=buffer.end,
            last_id=buffer.last_id.hex() if buffer.last_id else None,
            rows=len(buffer.rows),
            duplicates=buffer.duplicates,
            failures=[(id.hex(), reason.value) for id, reason in buffer.failures],
            superseded=[id.hex() for id in buffer.superseded],
            sources=dict(buffer.sources),
            gap=buffer.gap,
            writer=self._writer,
            attempt=uuid.uuid4().hex,
            created_at=time.time(),
            sealed=True,
        )
