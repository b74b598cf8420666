"""A consumer of aiokafka, as far as services.kernel.partitions uses one, over records in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError, OffsetOutOfRangeError

from schemas.sequences import Outcome
from tests.support.outcomes import TOPIC, record


class FakeConsumer:
    """One member of a group, alone. `rebalance` does what the coordinator would."""

    def __init__(self) -> None:
        self.log: dict[int, list[ConsumerRecord]] = {}
        self.begins: dict[int, int] = {}
        self.commits: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self._listener: Any = None

    def append(self, partition: int, *outcomes: Outcome | bytes) -> None:
        """Records arrive."""
        records = self.log.setdefault(partition, [])
        for outcome in outcomes:
            records.append(record(outcome, len(records), partition))

    async def rebalance(self, *partitions: int) -> None:
        """These are ours from now on."""
        await self._listener.on_partitions_revoked({TopicPartition(TOPIC, p) for p in self.positions})
        self.positions = dict.fromkeys(partitions, -1)
        await self._listener.on_partitions_assigned({TopicPartition(TOPIC, p) for p in partitions})

    def subscribe(self, topics: list[str], listener: object) -> None:
        assert topics == [TOPIC]
        self._listener = listener

    def seek(self, tp: TopicPartition, offset: int) -> None:
        if tp.partition not in self.positions:
            raise IllegalStateError(f"{tp} is not assigned")
        self.positions[tp.partition] = offset

    async def getmany(
        self, *tps: TopicPartition, timeout_ms: int, max_records: int
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        await asyncio.sleep(0)
        found = {}
        for tp in tps:
            if tp.topic != TOPIC:
                continue
            position = self.positions[tp.partition]
            if position < self.begins.get(tp.partition, 0):
                raise OffsetOutOfRangeError({tp: position})
            batch = self.log.get(tp.partition, [])[position : position + max_records]
            max_records -= len(batch)
            self.positions[tp.partition] += len(batch)
            if batch:
                found[tp] = batch
        return found

    def last_stable_offset(self, tp: TopicPartition) -> int:
        return len(self.log.get(tp.partition, []))

    async def beginning_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self.begins.get(tp.partition, 0) for tp in tps}

    async def end_offsets(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: len(self.log.get(tp.partition, [])) for tp in tps}

    async def committed(self, tp: TopicPartition) -> int | None:
        return self.commits.get(tp.partition)

    async def commit(self, offsets: Mapping[TopicPartition, Any]) -> None:
        self.commits.update({tp.partition: value.offset for tp, value in offsets.items()})
