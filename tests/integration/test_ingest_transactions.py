"""Transactions of ingest on a real Kafka."""

from __future__ import annotations

import os

from schemas import ids
from schemas.dead import DeadLetter
from schemas.prompts import Prompt
from services.ingest.metrics import IngestMetrics
from services.ingest.transactions import Message, Transactions
from services.kernel.kafka import MAX_VALUE_BYTES, Kafka
from tests.support.stream import PARTITIONS, create_topics, eventually


async def test_prompts_of_any_size_and_number_come_to_their_partitions_whole(kafka: Kafka) -> None:
    """More of them than one batch of a partition holds, one as large as any may be, and with them a letter."""
    await create_topics(kafka)
    sizes = [20_000] * 100 + [MAX_VALUE_BYTES, 1]
    prompts = {number.to_bytes(16, "big"): os.urandom(size) for number, size in enumerate(sizes)}
    topic = kafka.topics.prompts
    async with kafka.started(lambda: kafka.producer(transactional_id="one")) as producer:
        transactions = Transactions(producer, PARTITIONS, IngestMetrics())
        await transactions.commit(
            [
                *(Message(topic, value, Prompt, id=id) for id, value in prompts.items()),
                Message(kafka.topics.dead, b"letter", DeadLetter, key=b"key"),
            ]
        )

    async def readable() -> bool:
        """The markers of a commit reach its partitions a moment after it is answered."""
        letters = [record async for record in kafka.read_all(kafka.topics.dead)]
        return len([record async for record in kafka.read_all(topic)]) >= len(prompts) and bool(letters)

    await eventually(readable)
    came = {}
    async for record in kafka.read_all(topic):
        headers = dict(record.headers)
        assert headers["schema"] == b"prompt.v1"
        assert record.partition == ids.partition(headers["id"], PARTITIONS)
        assert headers["id"] not in came
        came[headers["id"]] = record.value
    assert came == prompts
    assert [record.value async for record in kafka.read_all(kafka.topics.dead)] == [b"letter"]
