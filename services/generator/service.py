"""The generator: poll -> admit -> generate -> check -> publish -> watermark -> commit.

Many records are in flight and finish out of order. A record is done when Kafka has acknowledged its outcome; the
watermark of each partition, with what is done beyond it, is committed every second and before a rebalance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import groupby

from aiokafka import ConsumerRecord

from schemas.prompts import Prompt
from schemas.sequences import Outcome
from services.generator import sglang
from services.generator.attempts import Attempts
from services.generator.budget import Budget
from services.generator.engines import Engines
from services.generator.metrics import GeneratorMetrics
from services.generator.offsets import Offsets
from services.generator.outcomes import Outcomes, undecodable
from services.generator.settings import GeneratorSettings
from services.generator.watch import Watch
from services.kernel import control, topics
from services.kernel.codec import Decoder
from services.kernel.control import ControlView
from services.kernel.errors import Reject, Stopped
from services.kernel.kafka import Kafka, KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.publisher import Publisher
from services.kernel.security import ca_context
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
    _budget: Budget
    _offsets: Offsets
    _outcomes: Outcomes

    def __init__(self, settings: GeneratorSettings, kafka: Kafka) -> None:
        self.metrics = GeneratorMetrics()
        self._settings, self._kafka = settings, kafka
        self._engines = Engines()
        self._decoder = Decoder(Prompt)
        self._trust = ca_context("TOKENHAUL_GENERATOR_CA_FILE", settings.ca_file) if settings.ca_file else None
        self._tasks: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)

    async def run(self, context: Context) -> None:
        """Connect everything, then generate until stopped or until this run is idle."""
        kafka, settings = self._kafka, self._settings
        context.health.set_ready(because=f"waiting for Kafka at {kafka.address}")
        async with AsyncExitStack() as stack:
            dataset = await topics.check(kafka)
            view = await stack.enter_async_context(control.following(kafka, context.spawn))
            admin = await stack.enter_async_context(kafka.started(kafka.admin))
            consumer = await stack.enter_async_context(
                kafka.started(lambda: kafka.consumer(kafka.topics.generator_group, "read_committed"))
            )
            publisher = await stack.enter_async_context(
                Publisher(kafka, context.spawn, self.metrics.producers_replaced.inc)
            )
            http = await stack.enter_async_context(sglang.http_client(self._trust, settings.api_key))
            self._outcomes = Outcomes(publisher, kafka.topics.sequences, dataset.partitions)
            self._budget = Budget(settings, view, publisher, kafka.topics.control)
            self._attempts = Attempts(settings, self._engines, http, self.metrics, view.cancelled)
            self._offsets = Offsets(
                kafka.topics, consumer, admin, context.fail, self._cancel, self.metrics, from_start=settings.from_start
            )
            stack.push_async_callback(self._offsets.member.close)
            context.begin()
            context.spawn(kafka.watch(context.health))
            watch = Watch(settings, dataset.model, view.probes, self._engines, http, self.metrics)
            stack.push_async_callback(_ended, context.spawn(watch.run()))  # before its client is closed under it
            self._offsets.member.subscribe()
            await self._loop(context, view)
            await self._drain(context.process.drain_seconds)

    async def _loop(self, context: Context, view: ControlView) -> None:
        idle = asyncio.Event()
        context.spawn(self._every_second(context, view, idle))
        member = self._offsets.member
        while not (context.stopping.is_set() or idle.is_set()):
            context.health.beat()
            context.health.set_ready(because="" if member.loaded else "no partition is assigned and loaded yet")
            with_room = [p for p, tracker in member.states.items() if tracker.room_for(tracker.high + 1)]
            # Twice what the engines hold: a place that gets free is filled at once, without a turn through Kafka.
            room = 0 if self._budget.halted else 2 * self._engines.capacity - self._in_flight
            records = await member.poll(room, with_room)
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
        began = time.monotonic()
        try:
            prompt = self._decoder.decode(record.value)
        except Reject as reject:
            outcome: Outcome = undecodable(record, reject)
        else:
            try:
                outcome = await self._attempts.outcome(prompt)
            except Stopped:
                return  # never sent, so nothing is lost: whoever comes next takes it up
        await self._outcomes.publish(outcome)
        tracker.done(record.offset)
        self._budget.add(outcome)
        self.metrics.finished(outcome, self._in_flight, time.monotonic() - began)

    async def _every_second(self, context: Context, view: ControlView, idle: asyncio.Event) -> None:
        while not idle.is_set():
            await asyncio.sleep(_COMMIT_SECONDS)
            await self._offsets.commit()
            await self._budget.tick()
            self.metrics.halted.set(self._budget.halted)
            if not context.until_idle or self._in_flight:
                continue
            ingest_done = view.idle(context.process.run_id) is not None
            if self._budget.halted or (ingest_done and await self._offsets.all_done()):
                idle.set()

    async def _drain(self, seconds: float) -> None:
        """Let what is in flight finish within `seconds`; the rest is generated again by whoever comes next."""
        self._engines.close()
        tasks: set[asyncio.Task[None]] = set().union(*self._tasks.values())
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=seconds)
            log.info("%d of %d ended in time", len(tasks) - len(unfinished), len(tasks), extra={"action": "drain"})
        await self._offsets.commit()

    def _cancel(self, partition: int) -> None:
        """The partition went to somebody else. Cancelling closes the connections: the engines stop generating."""
        for task in self._tasks.pop(partition, ()):
            task.cancel()

    @property
    def _in_flight(self) -> int:
        return sum(map(len, self._tasks.values()))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
