"""Kafka as tokenhaul uses it: where it is, how its clients are made, how its topics must be.

aiokafka's defaults are changed in one place, here: acks=all, idempotence, no auto-commit, no offset reset, no
compression (values are zstd frames already), requests as large as the topics' max.message.bytes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, KafkaTimeoutError, UnknownError

from services.kernel.closing import close
from services.kernel.errors import Stopped
from services.kernel.groups import partitions_of
from services.kernel.health import Health
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.retry import Backoff, set_within
from services.kernel.security import connection, why_refused

log = logging.getLogger("tokenhaul.kafka")

_WATCH_SECONDS = 5.0
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_VALUE_BYTES = MAX_MESSAGE_BYTES - 4096
"""What a message may hold, with room for headers and the batch around it."""
Isolation = Literal["read_committed", "read_uncommitted"]


class Startable(Protocol):
    """A client of aiokafka, before it has reached a broker."""

    async def start(self) -> None: ...


Client = TypeVar("Client", bound=Startable)
Answer = TypeVar("Answer")


class Topics(msgspec.Struct, frozen=True):
    """The names of a dataset's topics, and of the groups that read them."""

    prompts: str
    sequences: str
    dead: str
    cursors: str
    control: str
    generator_group: str
    sink_group: str

    @classmethod
    def of(cls, prefix: str) -> Topics:
        names = [field.removesuffix("_group") for field in cls.__struct_fields__]
        return cls(*(f"{prefix}.{name}" for name in names))


class Kafka:
    """Makes clients. Nothing connects before `started`. Raises SettingsError for security settings that do not fit."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.topics = Topics.of(settings.prefix)
        self._connection: dict[str, Any] = {
            "bootstrap_servers": settings.bootstrap,
            "client_id": settings.instance or "tokenhaul",
            **connection(settings),
        }

    @property
    def address(self) -> str:
        """The brokers as people know them."""
        return ",".join(self.settings.bootstrap)

    def admin(self) -> AIOKafkaAdminClient:
        """For topics and group offsets."""
        return AIOKafkaAdminClient(**self._connection)

    def producer(self, *, transactional_id: str | None = None) -> AIOKafkaProducer:
        """Idempotent; transactional when an id is given (which fences an older producer of that id)."""
        return AIOKafkaProducer(
            **self._connection,
            acks="all",
            enable_idempotence=True,
            transactional_id=transactional_id,
            transaction_timeout_ms=15_000,
            linger_ms=20,
            max_batch_size=256 * 1024,
            max_request_size=MAX_MESSAGE_BYTES,
        )

    def consumer(self, group: str | None, isolation: Isolation) -> AIOKafkaConsumer:
        """A group member, or a reader of assigned partitions when `group` is None. It never resets by itself."""
        session_ms = int(self.settings.session_timeout_seconds * 1000)
        assignor = _sticky()
        assignor.consumer = AIOKafkaConsumer(
            **self._connection,
            group_id=group,
            group_instance_id=(self.settings.instance or None) if group else None,
            isolation_level=isolation,
            enable_auto_commit=False,
            auto_offset_reset="none",
            partition_assignment_strategy=[assignor],
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=session_ms // 10,
            rebalance_timeout_ms=max(60_000, session_ms),
            max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
            fetch_max_bytes=4 * MAX_MESSAGE_BYTES,
        )
        return assignor.consumer

    @asynccontextmanager
    async def started(self, make: Callable[[], Client], stopping: asyncio.Event | None = None) -> AsyncIterator[Client]:
        """A client that has reached a broker. Waits for Kafka as long as it takes; Stopped when `stopping` is set."""
        client = await self.start(make, stopping)
        try:
            yield client
        finally:
            await close(client)

    async def start(self, make: Callable[[], Client], stopping: asyncio.Event | None = None) -> Client:
        """The same, for those who close the client themselves."""
        backoff = Backoff(base=0.5, cap=15.0)
        while True:
            client = make()
            try:
                await client.start()
                return client
            except (KafkaError, OSError) as error:
                await close(client)
                wait = backoff.next()
                # aiokafka only tells that it cannot bootstrap; a wrong password or certificate is worth a second look.
                log.warning(
                    "Kafka at %s does not answer (%s); trying again in %.1f s",
                    self.address, await why_refused(self._connection) or error, wait, extra={"action": "kafka_wait"},
                )  # fmt: skip
            except BaseException:
                await close(client)
                raise
            if stopping is None:
                await asyncio.sleep(wait)
            elif await set_within(stopping, wait):
                raise Stopped(f"asked to stop while waiting for Kafka at {self.address}")

    async def patiently(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `ask` returns, asked again as long as the brokers do not answer: only starting a client waits by
        itself. Raises what will not pass."""
        backoff = Backoff(base=0.5, cap=15.0)
        while True:
            try:
                return await ask()
            except KafkaError as error:
                if not may_pass(error):
                    raise
                wait = backoff.next()
                log.warning(
                    "Kafka at %s gives no answer (%r); asking again in %.1f s",
                    self.address, error, wait, extra={"action": "kafka_wait"},
                )  # fmt: skip
            await asyncio.sleep(wait)

    async def watch(self, health: Health) -> None:
        """For ever: say whether any of the brokers takes connections. aiokafka waits for them in silence."""
        away = False
        while True:
            answers = any([await _answers(address) for address in self.settings.bootstrap])
            if away == answers:
                away = not answers
                log.warning(
                    "Kafka at %s %s", self.address, "does not answer" if away else "answers again",
                    extra={"action": "kafka_away"},
                )  # fmt: skip
                health.set_kafka(away_because=f"Kafka at {self.address} does not answer" if away else "")
            await asyncio.sleep(_WATCH_SECONDS)

    async def read_all(self, topic: str, isolation: Isolation = "read_committed") -> AsyncIterator[ConsumerRecord]:
        """Every record of `topic` up to its stable end at the time of the call."""
        async with self.started(self.admin) as admin:
            partitions = await self.patiently(lambda: partitions_of(admin, topic))
        async with self.started(lambda: self.consumer(None, isolation)) as consumer:
            consumer.assign(partitions)
            ends = await self.patiently(lambda: consumer.end_offsets(partitions))
            begins = await self.patiently(lambda: consumer.beginning_offsets(partitions))
            for partition in partitions:
                consumer.seek(partition, begins[partition])
            behind = {partition for partition in partitions if begins[partition] < ends[partition]}
            while behind:
                for records in (await consumer.getmany(*behind, timeout_ms=500)).values():
                    for record in records:
                        yield record
                # A transaction marker is no record: only the position tells that the end is reached.
                behind = {p for p in behind if await consumer.position(p) < ends[p]}


def _sticky() -> Any:
    """An assignor for one consumer. aiokafka keeps on the class what a member was assigned, so that several of one
    process would claim the same; and never says of which generation of the group it was, so that what a member had
    before it froze would count as much as what others have now."""

    class Sticky(StickyPartitionAssignor):  # type: ignore[misc]
        consumer: AIOKafkaConsumer

        @classmethod
        def on_assignment(cls, assignment: Any) -> None:
            super().on_assignment(assignment)
            cls.on_generation_assignment(cls.consumer._coordinator.generation)

    return Sticky


def may_pass(error: KafkaError) -> bool:
    """Whether the same request may work later. aiokafka says no of its own time-outs, and of a broker that failed and
    could not say why, which is wrong. What it does not expect in a group it gives as the text of an error alone."""
    kind = type(error)
    if kind is KafkaError and (named := re.search(r"(\w+)\(", str(error))):
        kind = getattr(errors, named[1], kind)
    return bool(kind.retriable) or issubclass(kind, KafkaTimeoutError | UnknownError)


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_WATCH_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
