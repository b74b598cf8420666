"""The sink: poll -> read -> tell rows, failures and duplicates apart -> collect -> commit a shard.

A shard is its own commit (see chain.py). Kafka's group only spreads the partitions over sinks; where to read from
stands in the store, and nothing that was not committed there counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

from aiokafka import ConsumerRecord
from aiokafka.errors import OffsetOutOfRangeError

from services.kernel import control, topics
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.masking import masked
from services.kernel.settings import load
from services.sink.deadletters import DeadLetters
from services.sink.idle import Upstream
from services.sink.metrics import SinkMetrics
from services.sink.opening import claimed, proven
from services.sink.settings import SinkSettings
from services.sink.writer import Writer

log = logging.getLogger("tokenhaul.sink")


def make(environ: Mapping[str, str]) -> Sink:
    """A sink with the settings of `environ`. Raises SettingsError."""
    return Sink(load(SinkSettings, environ), Kafka(load(KafkaSettings, environ)))


class Sink:
    """One sink process."""

    def __init__(self, settings: SinkSettings, kafka: Kafka) -> None:
        self.metrics = SinkMetrics()
        self.metrics.max_age.set(settings.max_age_seconds)
        self._settings, self._kafka = settings, kafka

    async def run(self, context: Context) -> None:
        """Prove the store, connect, then write shards until stopped or until this run is idle."""
        kafka = self._kafka
        context.health.set_ready(because=f"waiting for the store at {masked(self._settings.root)}")
        store = await proven(self._settings.root, self.metrics)
        context.health.set_ready(because=f"waiting for Kafka at {kafka.address}")
        async with AsyncExitStack() as stack:
            dataset = await topics.check(kafka)
            await claimed(store, dataset, self.metrics)
            upstream = await self._upstream(context, stack) if context.until_idle else None
            consumer = await stack.enter_async_context(
                kafka.started(lambda: kafka.consumer(kafka.topics.sink_group, "read_uncommitted"))
            )
            letters = DeadLetters(kafka)
            stack.push_async_callback(letters.close)
            writer = Writer(
                self._settings, dataset, store, kafka.topics.sequences, consumer, letters, self.metrics, context.fail
            )
            stack.push_async_callback(writer.member.close)
            context.begin()
            context.spawn(kafka.watch(context.health))
            writer.member.subscribe()
            await self._loop(context, writer, upstream)
            await self._drain(context, writer)

    async def _loop(self, context: Context, writer: Writer, upstream: Upstream | None) -> None:
        member = writer.member
        while not context.stopping.is_set():
            context.health.beat()
            context.health.set_ready(because="" if member.loaded else "partitions are being assigned and loaded")
            records: list[ConsumerRecord] = []
            try:
                records = await member.poll(writer.room, list(member.states))
                await writer.take(records)
            except OffsetOutOfRangeError as error:
                # Deleted under our hands. What we have is kept; loading finds out what is missing and says so.
                await writer.flush()
                for partition in {tp.partition for tp in error.args[0]} & member.states.keys():
                    await member.reload(partition)
            await writer.rotate()
            writer.report()
            if upstream and not records and member.loaded and await upstream.idle() and await writer.caught_up():
                return

    async def _drain(self, context: Context, writer: Writer) -> None:
        """Commit what is open within the time there is; the rest is read again by whoever comes next."""
        try:
            async with asyncio.timeout(context.process.drain_seconds):
                await writer.flush()
        except TimeoutError:
            log.warning("stopped before all open shards were committed", extra={"action": "drain"})
        writer.report()

    async def _upstream(self, context: Context, stack: AsyncExitStack) -> Upstream:
        kafka = self._kafka
        view = await stack.enter_async_context(control.following(kafka, context.spawn))
        admin = await stack.enter_async_context(kafka.started(kafka.admin))
        reader = await stack.enter_async_context(kafka.started(lambda: kafka.consumer(None, "read_committed")))
        return Upstream(kafka, view, admin, reader, context.process.run_id)
