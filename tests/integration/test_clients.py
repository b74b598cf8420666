"""Clients of a real Kafka: how they share partitions, and how they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiokafka import TopicPartition

from services.kernel import topics
from services.kernel.kafka import Kafka
from services.kernel.partitions import Member
from tests.support.stream import eventually


class Reading:
    """Begins each partition at 0."""

    async def load(self, partition: int, state: int | None) -> tuple[int, int]:
        return 0, 0

    async def before_rebalance(self) -> None: ...

    def lost(self, partition: int, state: int) -> None: ...


def failed(error: BaseException) -> None:
    raise error


@asynccontextmanager
async def joined(kafka: Kafka) -> AsyncIterator[Member[int]]:
    """A member of the generators' group."""
    async with kafka.started(lambda: kafka.consumer(kafka.topics.generator_group, "read_committed")) as consumer:
        member = Member(consumer, kafka.topics.prompts, Reading(), failed)
        member.subscribe()
        try:
            yield member
        finally:
            await member.close()


async def test_a_member_keeps_its_partitions_when_another_comes_or_goes(kafka: Kafka) -> None:
    """What moves takes what is in flight with it, and is paid for again."""
    await topics.create(kafka, topics.new_dataset("d", "m", 12), replication=1, min_isr=1)

    async def shared(*members: Member[int]) -> list[set[int]]:
        def fairly() -> bool:
            return all(m.loaded and len(m.states) == 12 // len(members) for m in members)

        await eventually(fairly, 60)
        # A member that comes back with what it had before tells how old that is.
        coordinators = [member._consumer._coordinator for member in members]
        assert all(each._assignors[0].generation == each.generation > 0 for each in coordinators)
        return [set(member.states) for member in members]

    async with joined(kafka) as first, joined(kafka) as second:
        two = await shared(first, second)
        async with AsyncExitStack() as stack:
            third = await stack.enter_async_context(joined(kafka))
            three = await shared(first, second, third)
            assert three[0] < two[0]
            assert three[1] < two[1]
        again = await shared(first, second)
    assert again[0] > three[0]
    assert again[1] > three[1]


async def test_a_consumer_is_closed_whole_although_a_fetch_of_it_sleeps(kafka: Kafka) -> None:
    """As fetches do for a moment after an error. aiokafka's own stop ends there and leaves the connections open."""
    await topics.create(kafka, topics.new_dataset("d", "m", 1), replication=1, min_isr=1)
    async with kafka.started(lambda: kafka.consumer(None, "read_committed")) as consumer:
        partition = TopicPartition(kafka.topics.prompts, 0)
        consumer.assign([partition])
        consumer.seek(partition, (await consumer.end_offsets([partition]))[partition])
        fetches = {asyncio.create_task(asyncio.sleep(600)) for _ in range(2)}
        consumer._fetcher._pending_tasks |= fetches
        connections = list(consumer._client._conns.values())
        assert connections
        assert all(connection.connected() for connection in connections)
    assert all(fetch.cancelled() for fetch in fetches)
    assert not any(connection.connected() for connection in connections)
