"""A sink's writer over a consumer in memory and real files, turned by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from services.kernel.store import Data, LocalStore
from services.sink.chain import claim
from services.sink.metrics import SinkMetrics
from services.sink.settings import SinkSettings
from services.sink.writer import Writer
from tests.support.fake_consumer import FakeConsumer
from tests.support.outcomes import DATASET, TOPIC, make_sequence, numbers_in
from tests.support.stream import eventually

ROWS = [make_sequence(number) for number in numbers_in(0, 12)]


class Letters:
    """Takes the dead letters; `before` runs first."""

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.before: Callable[[], None] = lambda: None

    async def publish(self, letters: Sequence[tuple[bytes, bytes]]) -> None:
        self.before()
        self.ids += [id for id, _ in letters]


class Store(LocalStore):
    """Files; `before` and `after` each creation, and before an object or a folder is read, something may raise or
    wait."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.before_open: Callable[[str], object] = lambda key: None
        self.before_list: Callable[[], object] = lambda: None

    def open(self, key: str) -> BinaryIO:
        self.before_open(key)
        return super().open(key)

    def list(self, folder: str) -> list[str]:
        self.before_list()
        return super().list(folder)

    def create(self, key: str, data: Data) -> bool:
        self.before()
        created = super().create(key, data)
        self.after()
        return created


class Bench:
    """A writer with everything around it."""

    def __init__(self, root: Path, consumer: FakeConsumer | None = None, **settings: Any) -> None:
        self.root = root
        self.consumer = consumer or FakeConsumer()
        self.store, self.letters, self.metrics = Store(root), Letters(), SinkMetrics()
        self.errors: list[BaseException] = []
        claim(self.store, DATASET)
        self.writer = Writer(
            SinkSettings(root=str(root), **settings),
            DATASET,
            self.store,
            TOPIC,
            self.consumer,
            self.letters,  # type: ignore[arg-type]
            self.metrics,
            self.errors.append,
        )
        self.writer.member.subscribe()

    async def assign(self, *partitions: int) -> None:
        await self.consumer.rebalance(*partitions)
        await self.loaded()

    async def loaded(self) -> None:
        await eventually(lambda: self.writer.member.loaded)

    async def turn(self) -> int:
        """What the service's loop does."""
        member = self.writer.member
        records = await member.poll(self.writer.room, list(member.states))
        await self.writer.take(records)
        await self.writer.rotate()
        self.writer.report()
        return len(records)

    async def read(self) -> None:
        """Turn until nothing comes any more."""
        while await self.turn() or not self.writer.member.loaded:
            pass

    async def finish(self) -> None:
        """Turn until all there is stands in shards, as with --until-idle."""
        await self.read()
        while not await self.writer.caught_up():
            await self.read()

    def shards(self, partition: int = 0) -> list[tuple[int, int]]:
        """(start, rows) of each."""
        folder = self.root / "test" / f"partition={partition:05d}"
        return [(int(path.stem), pq.read_metadata(path).num_rows) for path in sorted(folder.glob("*.parquet"))]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"tokenhaul_{name}", labels)
