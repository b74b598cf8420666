"""Many writers of one chain, attacked at random: they overlap, die, go on as zombies, and lose answers of the store.

After every step the shards must tile [0, tail); in the end nothing may be lost or there twice, and the first row of a
record must be the one that was kept. What the files hold is read with pyarrow alone, and by `tokenhaul verify`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.sequences import Failure, FailureReason, Outcome
from services.kernel.errors import Retry
from services.kernel.objects import open_store
from services.kernel.store import Data, LocalStore, Store
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim
from services.sink.verify import verify
from tests.support.outcomes import DATASET, MemoryStore, fill, make_failure, make_sequence, numbers_in
from tests.support.s3 import S3Server

RECORDS = numbers_in(0, 6)
# A row, another row and a failure of each record, and something unreadable.
CHOICES: list[Outcome | bytes] = [
    *(make_sequence(number, [50 + answer, 2]) for number in RECORDS for answer in range(2)),
    *(make_failure(number) for number in RECORDS),
    b"unreadable",
]


Log = list[Outcome | bytes]
Actions = list[tuple[str, int, int]]


class FaultyStore:
    """The store a writer sees: the next creation may fail before its effect or after it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fault: str | None = None

    def create(self, key: str, data: Data) -> bool:
        fault, self.fault = self.fault, None
        if fault == "before":
            raise Retry("store", "no answer")
        created = self._store.create(key, data)
        if fault == "after":
            raise Retry("store", "no answer")
        return created

    def open(self, key: str) -> BinaryIO:
        return self._store.open(key)

    def list(self, folder: str) -> list[str]:
        return self._store.list(folder)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def sweep(self) -> None:
        self._store.sweep()

    def name(self, key: str) -> str:
        return self._store.name(key)


class Writer:
    """What a sink does about one partition: on assignment, on a record, on rotation."""

    def __init__(self, store: Store) -> None:
        self.store = FaultyStore(store)
        self.load()

    def load(self) -> None:
        """An assignment, or a reload: nothing is kept."""
        self.chain = Chain(self.store, DATASET, 0, "writer")
        self.chain.refresh()
        self.buffer = Buffer(self.chain.tail, self.chain.last_id)

    def refresh(self) -> None:
        """A rebalance that leaves us the partition: the open shard is kept if nobody wrote meanwhile."""
        self.chain.refresh()
        if self.buffer.start != self.chain.tail:
            self.buffer = Buffer(self.chain.tail, self.chain.last_id)

    def read(self, log: list[Outcome | bytes], count: int) -> None:
        fill(self.buffer, self.chain, log[self.buffer.end : self.buffer.end + count])

    def commit(self, fault: str | None) -> None:
        if self.buffer.end == self.buffer.start:
            return
        self.store.fault = fault
        try:
            size = self.chain.commit(self.buffer)
        except Retry:
            return
        if size is None:
            self.load()
        else:
            self.buffer = Buffer(self.chain.tail, self.chain.last_id)


WRITERS = 3
ACTIONS = st.tuples(
    st.sampled_from(["read", "commit", "read and commit", "answer lost", "no answer", "rebalance", "kill"]),
    st.integers(0, WRITERS - 1),
    st.integers(1, 4),
)
FAULTS = {"no answer": "before", "answer lost": "after"}


def attack(store: Store, log: Log, actions: Actions, read_by_others: Log | None = None) -> None:
    """All writers own the partition at once; in the end a last one finishes the work. The second one is of another
    version, and reads the same log as `read_by_others`."""
    writers = [Writer(store) for _ in range(WRITERS)]
    for action, number, count in actions:
        if action == "kill":
            writers[number] = Writer(store)
        elif action == "rebalance":
            writers[number].refresh()
        else:
            if action != "commit":
                writers[number].read(read_by_others or log if number == 1 else log, count)
            if action != "read":
                writers[number].commit(FAULTS.get(action))
        assert tiled_until(store) <= len(log)
    last = Writer(store)
    while last.buffer.end < len(log):
        last.read(log, 3)
        last.commit(None)
    assert tiled_until(store) == len(log)


def tiled_until(store: Store) -> int:
    """Where the shards end, each beginning where the one before it ended."""
    tail = 0
    for name in store.list("test/partition=00000"):
        assert int(name.removesuffix(".parquet")) == tail
        with store.open(f"test/partition=00000/{name}") as file:
            tail = footer_of(pq.ParquetFile(file))["end"]
    return tail


def copy(store: Store, directory: Path) -> None:
    """All of the dataset as files."""
    for name in ("_dataset.json", *(f"partition=00000/{name}" for name in store.list("test/partition=00000"))):
        path = directory / "test" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.open(f"test/{name}") as file:
            path.write_bytes(file.read())


def footer_of(shard: pq.ParquetFile) -> dict[str, Any]:
    return dict(json.loads((shard.metadata.metadata or {})[b"tokenhaul"]))


def check(root: Path, log: list[Outcome | bytes]) -> None:
    """What the files hold is what the log asks for."""
    kept: dict[str, tuple[int, int]] = {}
    failed: list[str] = []
    for path in sorted((root / "test" / "partition=00000").glob("*.parquet")):
        shard = pq.ParquetFile(path)
        failed += [id for id, _ in footer_of(shard)["failures"]]
        for row in shard.read().to_pylist():
            assert row["id"] not in kept
            kept[row["id"]] = (row["kafka_offset"], row["input_ids"][-2])
    first_rows: dict[str, tuple[int, int]] = {}
    failures = set()
    for offset, outcome in enumerate(log):
        if isinstance(outcome, Failure):
            failures.add(outcome.id.hex())
        elif not isinstance(outcome, bytes):
            first_rows.setdefault(outcome.prompt.id.hex(), (offset, outcome.output_ids[-2]))
    assert kept == first_rows
    assert len(failed) == len(set(failed))
    assert failures - first_rows.keys() <= set(failed)
    report = verify(root)
    assert report.problems == []
    assert report.rows == len(first_rows)
    assert report.failures.get("undecodable", 0) == sum(outcome == b"unreadable" for outcome in log)
    assert report.failures.get("engine_rejected", 0) == len(failures - first_rows.keys())


LOGS = st.lists(st.sampled_from(CHOICES), min_size=10, max_size=40)
MANY_ACTIONS = st.lists(ACTIONS, min_size=20, max_size=60)


def attack_and_check(store: Store, log: Log, actions: Actions) -> None:
    claim(store, DATASET)
    attack(store, log, actions)
    with tempfile.TemporaryDirectory() as directory:
        copy(store, Path(directory))
        check(Path(directory), log)


@settings(max_examples=40)
@given(log=LOGS, actions=MANY_ACTIONS)
def test_nothing_is_lost_and_nothing_is_there_twice(log: Log, actions: Actions) -> None:
    attack_and_check(MemoryStore(), log, actions)


@settings(max_examples=30)
@given(log=LOGS, actions=MANY_ACTIONS)
def test_nor_in_files(log: Log, actions: Actions) -> None:
    with tempfile.TemporaryDirectory() as directory:
        attack_and_check(LocalStore(Path(directory)), log, actions)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=LOGS, actions=MANY_ACTIONS)
def test_nor_on_s3(s3: S3Server, log: Log, actions: Actions) -> None:
    attack_and_check(open_store(s3.fresh_root()), log, actions)


@settings(max_examples=30)
@given(log=LOGS, actions=MANY_ACTIONS, refused=st.sets(st.sampled_from(RECORDS), min_size=1))
def test_versions_that_judge_differently_leave_nothing_twice(log: Log, actions: Actions, refused: set[int]) -> None:
    """A rolling update: to one of the writers, rows of some records are failures."""
    refusals = {make_sequence(number).prompt.id: make_failure(number, FailureReason.NAN) for number in refused}
    other: Log = [
        outcome if isinstance(outcome, bytes | Failure) else refusals.get(outcome.prompt.id, outcome) for outcome in log
    ]
    store = MemoryStore()
    claim(store, DATASET)
    attack(store, log, actions, other)
    with tempfile.TemporaryDirectory() as directory:
        copy(store, Path(directory))
        report = verify(Path(directory))
    assert report.problems == []
    decided = report.rows + sum(report.failures.values()) - report.failures.get("undecodable", 0)
    assert decided == len({outcome.record_id for outcome in log if not isinstance(outcome, bytes)})
