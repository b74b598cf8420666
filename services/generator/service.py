"""The generator: poll -> admit -> generate -> check -> publish -> watermark -> commit.

Many records are in flight and finish out of order. A record is done when Kafka has acknowledged its outcome; the
watermark of each partition, with what is done beyond it, is committed every second and before a rebalance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import groupby

from aiokafka import ConsumerRecord

from schemas.prompts import Prompt
from schemas.sequences import Failure, Outcome
from services.generator.metrics import GeneratorMetrics
from services.generator.outcomes import undecodable
from services.generator.settings import GeneratorSettings
from services.generator.wiring import Parts, connect
from services.kernel import logs
from services.kernel.codec import Decoder
from services.kernel.errors import Reject, Stopped
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.security import ca_context
from services.kernel.settings import load
from services.kernel.watermark import Tracker

log = logging.getLogger("tokenhaul.generator")

_COMMIT_SECONDS = 1.0
_TELL_SECONDS = 5.0


def make(environ: Mapping[str, str]) -> Generator:
    """A generator with the settings of `environ`. Raises SettingsError."""
    return Generator(load(GeneratorSettings, environ), Kafka(load(KafkaSettings, environ)))


class Generator:
    """One generator process."""

    def __init__(self, settings: GeneratorSettings, kafka: Kafka) -> None:
        self.metrics = GeneratorMetrics()
        self._settings, self._kafka = settings, kafka
        self._trust = ca_context("TOKENHAUL_GENERATOR_CA_FILE", settings.ca_file) if settings.ca_file else None
        self._decoder = Decoder(Prompt)

    async def run(self, context: Context) -> None:
        """Connect everything, then generate until stopped or until this run is idle."""
        context.health.set_ready(because=f"waiting for Kafka at {self._kafka.address}")
        async with AsyncExitStack() as stack:
            parts = await connect(self._settings, self._kafka, self._trust, self.metrics, context, stack)
            context.begin()
            context.spawn(self._kafka.watch(context.health))
            parts.offsets.member.subscribe()
            await self._loop(context, parts)
            await self._drain(context, parts)

    async def _loop(self, context: Context, parts: Parts) -> None:
        idle = asyncio.Event()
        context.spawn(self._every_second(context, parts, idle))
        member, engines, in_flight = parts.offsets.member, parts.engines, parts.in_flight
        while not (context.stopping.is_set() or idle.is_set()):
            context.health.beat()
            context.health.set_ready(because="" if member.loaded else "no partition is assigned and loaded yet")
            engines.paused = parts.budget.closed()
            engines.new_until = parts.offsets.ours_until
            # Twice what the engines hold: a place that gets free is filled at once, without a turn through Kafka.
            room = 0 if engines.paused else 2 * engines.capacity - len(in_flight)
            with_room = [p for p, tracker in member.states.items() if tracker.room_for(tracker.high + 1)]
            records = await member.poll(room, with_room)
            for partition, group in groupby(records, key=lambda record: record.partition):
                self._admit(parts, partition, {record.offset: record for record in group})
            await parts.offsets.note_positions()

    def _admit(self, parts: Parts, partition: int, records: dict[int, ConsumerRecord]) -> None:
        """Begin with what is new; what is done or being worked on already is left alone."""
        tracker = parts.offsets.member.states[partition]
        taken, rewind = tracker.take(records)
        if rewind is not None:
            parts.offsets.member.seek(partition, rewind)
        for offset in taken:
            parts.in_flight.start(partition, offset, self._work(parts, tracker, records[offset]))
        self.metrics.taken(len(taken), len(parts.in_flight))

    async def _work(self, parts: Parts, tracker: Tracker, record: ConsumerRecord) -> None:
        began = time.monotonic()
        logs.about(topic=record.topic, partition=record.partition, offset=record.offset)
        try:
            prompt = self._decoder.decode(record.value)
        except Reject as reject:
            outcome: Outcome = undecodable(record, reject)
        else:
            logs.about(record=prompt.id.hex())
            try:
                outcome = await parts.attempts.outcome(prompt)
            except Stopped:
                return  # never sent, so nothing is lost: whoever comes next takes it up
        await parts.outcomes.publish(outcome)
        tracker.done(record.offset)
        if isinstance(outcome, Failure):
            log.info("failed: %s: %s", outcome.reason, outcome.detail, extra={"action": "failed"})
        parts.budget.add(outcome)
        self.metrics.finished(outcome, len(parts.in_flight), time.monotonic() - began)

    async def _every_second(self, context: Context, parts: Parts, idle: asyncio.Event) -> None:
        """Commit, keep to the budget, and find out whether all is done."""
        while not idle.is_set():
            await asyncio.sleep(_COMMIT_SECONDS)
            await parts.offsets.commit()
            parts.engines.let_go()
            await parts.budget.tick(len(parts.in_flight) - parts.engines.waiting)
            self.metrics.halted.set(parts.budget.halted)
            if context.until_idle and (parts.budget.stopped or await self._all_done(context, parts)):
                idle.set()

    async def _all_done(self, context: Context, parts: Parts) -> bool:
        ingest_done = parts.view.idle(context.process.run_id) is not None
        return ingest_done and not parts.in_flight and await parts.offsets.all_done()

    async def _drain(self, context: Context, parts: Parts) -> None:
        """Send nothing new, let what is in flight finish in time; the rest is generated again by whoever comes next."""
        parts.engines.close()
        await parts.in_flight.finish(context.process.drain_seconds)
        await parts.offsets.commit()
        try:
            async with asyncio.timeout(_TELL_SECONDS):
                await parts.budget.tick(len(parts.in_flight))
        except TimeoutError:  # Kafka is away: who was asked to stop does not wait for it
            log.warning("the others are not told what was made last", extra={"action": "drain"})
