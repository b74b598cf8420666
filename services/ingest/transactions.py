"""All or nothing onto several topics: Kafka's transactions, as ingest needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import IllegalOperation, KafkaError, ProducerFenced
from aiokafka.producer.message_accumulator import BatchBuilder

from schemas import ids
from services.ingest.metrics import IngestMetrics
from services.kernel import failpoints
from services.kernel.codec import schema_of
from services.kernel.errors import Fatal, Retry

# A transaction that takes longer is given up with its producer; whether it was committed the cursors will tell.
COMMIT_SECONDS = 30.0
# Kafka itself gives one up after transaction_timeout_ms (services.kernel.kafka), which looks like being fenced.
TRANSACTION_SECONDS = 15.0
TOOK_OVER = "another ingest took over: only one may run for these topics"


class Message(NamedTuple):
    """What goes onto a topic. `type` is that of `value`; a prompt has an `id`, `replay` names the command it obeys."""

    topic: str
    value: bytes
    type: type[msgspec.Struct]
    key: bytes | None = None
    id: bytes | None = None
    replay: bytes | None = None


class Transactions:
    """Of a producer that is transactional and started, which fenced any predecessor."""

    def __init__(self, producer: AIOKafkaProducer, partitions: int, metrics: IngestMetrics) -> None:
        self._producer, self._partitions, self._metrics = producer, partitions, metrics

    async def commit(self, messages: list[Message]) -> None:
        """Send all in one transaction, or nothing. Raises Retry when Kafka did not take it (the producer is then done
        with), Fatal when another ingest took over."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                await self._producer.begin_transaction()
                failpoints.passing("transaction.begun")
                await self._send_all(messages)
                failpoints.passing("transaction.sent")
                await self._producer.commit_transaction()
                failpoints.passing("transaction.ended")
        except ProducerFenced as error:
            if time.monotonic() - began < TRANSACTION_SECONDS:
                raise Fatal(TOOK_OVER) from error
            raise Retry("transaction_timeout", "Kafka gave the transaction up") from error
        except (KafkaError, TimeoutError) as error:
            raise Retry("kafka", f"a transaction failed: {error!r}") from error
        self._metrics.transaction_seconds.observe(time.monotonic() - began)

    async def _send_all(self, messages: list[Message]) -> None:
        sent: list[asyncio.Future[Any]] = []
        try:
            async for future in self._sending(messages):
                future.add_done_callback(_look)  # should a later one not even be sent, nobody waits for this one
                sent.append(future)
        except (IllegalOperation, AssertionError):  # the latter where it had to wait for the batch before
            await asyncio.gather(*sent)  # the transaction failed meanwhile: those that were sent know why
            raise
        await asyncio.gather(*sent)

    async def _sending(self, messages: list[Message]) -> AsyncIterator[asyncio.Future[Any]]:
        """A record's partition is decided by its id, all others' by their key."""
        for topic, partition, batch in self._batches(messages):
            yield await self._producer.send_batch(batch, topic, partition=partition)
        for message in messages:
            if message.id is None:
                headers = [("schema", schema_of(message.type))]
                yield await self._producer.send(message.topic, message.value, message.key, headers=headers)

    def _batches(self, messages: list[Message]) -> Iterator[tuple[str, int, BatchBuilder]]:
        """Prompts, packed for the partitions their ids decide. One by one they would cost aiokafka several times as
        much, and Kafka too: what arrives first is sent at once, in requests that hold little."""
        filling: dict[tuple[str, int], BatchBuilder] = {}
        for message in messages:
            if message.id is None:
                continue
            place = message.topic, ids.partition(message.id, self._partitions)
            if place not in filling or not _append(filling[place], message):
                if full := filling.get(place):
                    yield *place, full
                filling[place] = self._producer.create_batch()
                _append(filling[place], message)
        for place, batch in filling.items():
            yield *place, batch


def _append(batch: BatchBuilder, message: Message) -> bool:
    """Whether there was room. A batch that is empty takes any message."""
    headers = [("schema", schema_of(message.type)), ("id", message.id)]
    if message.replay is not None:  # it stands on the topic already, as it should: audits must know
        headers.append(("replay", message.replay))
    return batch.append(timestamp=None, key=message.key, value=message.value, headers=headers) is not None


def _look(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()
