"""An idempotent producer that is replaced when it fails.

aiokafka gives a batch its sequence numbers before it is sent; when the batch expires (no leader for long enough) they
are spent, and the broker may refuse all that follows for ever. So a failed send retires the whole producer: it is
closed within a bound, a new one is made, and everything not acknowledged is sent again. A record may then be on its
topic twice, which readers of these topics are made for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordTooLargeError

from services.kernel import failpoints
from services.kernel.closing import close
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka
from services.kernel.retry import Backoff

log = logging.getLogger("tokenhaul.publisher")

Headers = Sequence[tuple[str, bytes]]


class _Message(msgspec.Struct, eq=False):
    """A record and who waits for it. `producer` is the one that has it."""

    topic: str
    value: bytes
    partition: int | None
    key: bytes | None
    headers: Headers
    acknowledged: asyncio.Future[None]
    producer: AIOKafkaProducer | None = None


class Publisher:
    """Sends records; use it as an async context manager. `spawn` runs its work beside the service (Context.spawn);
    `on_replaced` is called whenever a producer had to be retired."""

    def __init__(
        self,
        kafka: Kafka,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self._kafka, self._spawn = kafka, spawn
        self._backoff = Backoff(base=0.5, cap=15.0)
        self._producer: AIOKafkaProducer | None = None
        self._unacknowledged: dict[_Message, None] = {}  # in the order they were given
        self._replacing: asyncio.Task[None] | None = None
        self._on_replaced = on_replaced

    async def __aenter__(self) -> Publisher:
        self._producer = await self._kafka.start(self._kafka.producer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        if self._producer is not None:
            await close(self._producer)

    async def publish(
        self, topic: str, value: bytes, *, headers: Headers, partition: int | None = None, key: bytes | None = None
    ) -> None:
        """Return when all in-sync replicas have the record, however long that takes. Raises Reject("too_large")."""
        message = _Message(topic, value, partition, key, headers, asyncio.get_running_loop().create_future())
        self._unacknowledged[message] = None
        try:
            failpoints.passing("publish.before")
            if self._producer is not None:
                await self._send(message, self._producer)
            await message.acknowledged
            failpoints.passing("publish.after")
        finally:
            self._unacknowledged.pop(message, None)

    async def _send(self, message: _Message, producer: AIOKafkaProducer) -> None:
        message.producer = producer
        try:
            sent = await producer.send(
                message.topic, message.value, message.key, message.partition, headers=message.headers
            )
        except MessageSizeTooLargeError as error:
            self._settle(message, Reject("too_large", str(error)))
        except KafkaError as error:
            self._retire(producer, error)
        else:
            sent.add_done_callback(lambda ended: self._answered(message, producer, ended))

    def _answered(self, message: _Message, producer: AIOKafkaProducer, sent: asyncio.Future[object]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if not sent.cancelled() and error is None:
            self._backoff.reset()
            self._settle(message, None)
        elif isinstance(error, RecordTooLargeError | MessageSizeTooLargeError):
            self._settle(message, Reject("too_large", str(error)))
        elif message.producer is producer:  # else it was sent again already
            self._retire(producer, error)

    @staticmethod
    def _settle(message: _Message, error: Reject | None) -> None:
        if message.acknowledged.done():
            return
        if error is None:
            message.acknowledged.set_result(None)
        else:
            message.acknowledged.set_exception(error)

    def _retire(self, producer: AIOKafkaProducer, error: BaseException | None) -> None:
        if producer is self._producer:
            log.warning("a produce failed (%r): replacing the producer", error, extra={"action": "replace_producer"})
            self._producer = None
            self._replacing = self._spawn(self._replace(producer))

    async def _replace(self, old: AIOKafkaProducer) -> None:
        await close(old)
        await asyncio.sleep(self._backoff.next())
        producer = await self._kafka.start(self._kafka.producer)
        self._producer = producer
        self._on_replaced()
        for message in list(self._unacknowledged):
            if message.producer is not producer:
                await self._send(message, producer)
            if self._producer is not producer:  # it failed as well: its replacement sends again
                return
