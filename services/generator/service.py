"""The generator: poll -> admit -> generate -> check -> publish -> watermark -> commit.

Many records are in flight and finish out of order. A record is done when Kafka has acknowledged its outcome; the
watermark of each partition, with what is done beyond it, is committed every second and before a rebalance.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import groupby

from aiokafka import ConsumerRecord

from schemas.prompts import Prompt
from schemas.sequences import Outcome
from services.generator import sglang
from services.generator.attempts import Attempts
from services.generator.engines import Engines
from services.generator.metrics import GeneratorMetrics
from services.generator.offsets import Offsets
from services.generator.outcomes import Outcomes, undecodable
from services.generator.settings import GeneratorSettings
from services.kernel import control, topics
from services.kernel.codec import Decoder
from services.kernel.control import ControlView
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka, KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.settings import load
from services.kernel.watermark import Tracker

log = logging.getLogger("tokenhaul.generator")

_COMMIT_SECONDS = 1.0


def make(environ: Mapping[str, str]) -> Generator:
    """A generator with the settings of `environ`. Raises SettingsError."""
    return Generator(load(GeneratorSettings, environ), Kafka(load(KafkaSettings, environ)))


class Generator:
    """One generator process."""

    _attempts: Attempts
    _offsets: Offsets
    _outcomes: Outcomes

    def __init__(self, settings: GeneratorSettings, kafka: Kafka) -> None:
        self.metrics = GeneratorMetrics()
        self._settings, self._kafka = settings, kafka
        self._decoder = Decoder(Prompt)
        self._tasks: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)

    async def run(self, context: Context) -> None:
        """Connect everything, then generate until stopped or until this run is idle."""
        kafka, settings = self._kafka, self._settings
        context.health.set_ready(because=f"waiting for Kafka at {kafka.address}")
        async with AsyncExitStack() as stack:
            partitions = (await topics.check(kafka)).partitions
            view = await stack.enter_async_context(control.following(kafka, context.spawn))
            admin = await stack.enter_async_context(kafka.started(kafka.admin))
            consumer = await stack.enter_async_context(
                kafka.started(lambda: kafka.consumer(kafka.topics.generator_group, "read_committed"))
            )
            producer = await stack.enter_async_context(kafka.started(kafka.producer))
            self._outcomes = Outcomes(producer, kafka.topics.sequences, partitions)
            http = await stack.enter_async_context(sglang.http_client())
            engines = Engines(settings.engines, settings.window, http, self.metrics)
            self._attempts = Attempts(settings, engines, http, self.metrics)
            self._offsets = Offsets(
                kafka.topics, consumer, admin, context.fail, self._cancel, self.metrics, from_start=settings.from_start
            )
            stack.push_async_callback(self._offsets.member.close)
            context.begin()
            context.spawn(engines.watch())
            self._offsets.member.subscribe()
            # Twice what the engines hold: a place that gets free is filled at once, without a turn through Kafka.
            await self._loop(context, 2 * engines.capacity, view)
            await self._drain(context.process.drain_seconds)

    async def _loop(self, context: Context, capacity: int, view: ControlView) -> None:
        idle = asyncio.Event()
        context.spawn(self._keep_committing(context, view, idle))
        member = self._offsets.member
        while not (context.stopping.is_set() or idle.is_set()):
            context.health.beat()
            context.health.set_ready(because="" if member.loaded else "no partition is assigned and loaded yet")
            with_room = [p for p, tracker in member.states.items() if tracker.room_for(tracker.high + 1)]
            records = await member.poll(capacity - self._in_flight, with_room)
            for partition, group in groupby(records, key=lambda record: record.partition):
                self._admit(context, partition, {record.offset: record for record in group})
            await self._offsets.note_positions()

    def _admit(self, context: Context, partition: int, records: dict[int, ConsumerRecord]) -> None:
        tracker = self._offsets.member.states[partition]
        taken, rewind = tracker.take(records)
        if rewind is not None:
            self._offsets.member.seek(partition, rewind)
        for offset in taken:
            task = context.spawn(self._work(tracker, records[offset]))
            self._tasks[partition].add(task)
            task.add_done_callback(self._tasks[partition].discard)
        self.metrics.taken(len(taken), self._in_flight)

    async def _work(self, tracker: Tracker, record: ConsumerRecord) -> None:
        try:
            prompt = self._decoder.decode(record.value)
        except Reject as reject:
            outcome: Outcome = undecodable(record, reject)
        else:
            outcome = await self._attempts.outcome(prompt)
        await self._outcomes.publish(outcome)
        tracker.done(record.offset)
        self.metrics.finished(outcome, self._in_flight)

    async def _keep_committing(self, context: Context, view: ControlView, idle: asyncio.Event) -> None:
        while not idle.is_set():
            await asyncio.sleep(_COMMIT_SECONDS)
            await self._offsets.commit()
            idle_asked = context.until_idle and view.idle(context.process.run_id)
            if idle_asked and not self._in_flight and await self._offsets.all_done():
                idle.set()

    async def _drain(self, seconds: float) -> None:
        """Let what is in flight finish within `seconds`; the rest is generated again by whoever comes next."""
        tasks: set[asyncio.Task[None]] = set().union(*self._tasks.values())
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=seconds)
            log.info("%d of %d finished in time", len(tasks) - len(unfinished), len(tasks), extra={"action": "drain"})
        await self._offsets.commit()

    def _cancel(self, partition: int) -> None:
        """The partition went to somebody else. Cancelling closes the connections: the engines stop generating."""
        for task in self._tasks.pop(partition, ()):
            task.cancel()

    @property
    def _in_flight(self) -> int:
        return sum(map(len, self._tasks.values()))
