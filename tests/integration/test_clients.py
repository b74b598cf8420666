"""Clients of a real Kafka, closed."""

from __future__ import annotations

import asyncio

from aiokafka import TopicPartition

from services.kernel import topics
from services.kernel.kafka import Kafka


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
