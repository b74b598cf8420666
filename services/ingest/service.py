"""tokenhaul ingest: records of files and requests become prompts on the prompts topic, each exactly once.

    files -> lines -> conversation -> text -> ids -> prompt -> a transaction with the file's cursor
    POST /v1/prompts -> lines -> ...                        -> ... the next transaction takes them along

Reading and tokenizing run ahead in threads; publishing goes batch by batch, in the order of reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

from aiokafka.errors import KafkaError

from services.ingest import commands, sources
from services.ingest.backlog import Backlog
from services.ingest.declaration import Declaration
from services.ingest.http import PromptsApi, served
from services.ingest.intake import Intake
from services.ingest.ledger import Ledger
from services.ingest.metrics import IngestMetrics
from services.ingest.reading import Reading
from services.ingest.settings import IngestSettings, check
from services.ingest.sources import Sources
from services.kernel import control, topics
from services.kernel.errors import Fatal, Retry
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.retry import Backoff, set_within
from services.kernel.settings import load

log = logging.getLogger("tokenhaul.ingest")

_SLOW_SECONDS = 5.0


class Ingest:
    """Reads, tokenizes, publishes; ends when all is read (`--until-idle`) or when it is asked to."""

    _reading: Reading
    _intake: Intake

    def __init__(self, settings: IngestSettings, kafka: Kafka, declared: Sources, *, strict: bool = False) -> None:
        """`strict`: a source that stopped is an error at the end."""
        self.metrics = IngestMetrics()
        self._settings, self._kafka, self._declared, self._strict = settings, kafka, declared, strict
        self._backoff = Backoff(base=0.5, cap=15.0)
        self._backlog = Backlog(kafka, settings.backlog)

    async def run(self, context: Context) -> None:
        """See services.kernel.lifecycle.Service."""
        context.health.set_ready(because=f"waiting for Kafka at {self._kafka.address}")
        self._intake = Intake(lambda batch: self._reading.declared.make(batch), context.fail)
        async with AsyncExitStack() as stack:
            if self._settings.http_port and not context.until_idle:
                api = PromptsApi(self._settings, self._intake, lambda: self._backlog.full)
                await stack.enter_async_context(served(api.app, self._settings))
            while not context.stopping.is_set():
                try:
                    await self._attempt(context)
                    return
                except (Retry, KafkaError) as error:
                    self.metrics.retried(error.cause if isinstance(error, Retry) else "kafka")
                    context.health.set_ready(because=f"Kafka at {self._kafka.address}: {error!r}")
                    wait = self._backoff.next()
                    log.warning("%r; trying again in %.1f s", error, wait, extra={"action": "retry"})
                    await set_within(context.stopping, wait)

    async def _attempt(self, context: Context) -> None:
        """Fence a predecessor, find out where it was, go on. Kafka may be away, the topics long: it takes its time."""
        if not hasattr(self, "_reading"):
            await self._prepare(context)
        fencing = f"{self._kafka.settings.prefix}.ingest"
        async with (
            self._kafka.started(lambda: self._kafka.producer(transactional_id=fencing), context.stopping) as producer,
            control.following(self._kafka, context.spawn) as view,
        ):
            ledger = Ledger(self._kafka, producer, self._reading.declared.dataset.partitions, self.metrics)
            await ledger.recover()
            await ledger.announce(self._reading.declared.probes, view)
            self._reading.begin(ledger)
            context.begin()
            context.health.set_ready()
            await self._haul(context, ledger, view)

    async def _prepare(self, context: Context) -> None:
        dataset = await topics.check(self._kafka)
        declared = await asyncio.to_thread(Declaration.prepare, self._settings, self._declared, dataset)
        self._reading = Reading(self._settings, declared, self._intake, self.metrics, take_rest=context.until_idle)
        if not context.until_idle:
            context.spawn(self._reading.upkeep.follow())
        context.spawn(self._backlog.follow())

    async def _haul(self, context: Context, ledger: Ledger, view: control.ControlView) -> None:
        reading, backlog, closing = self._reading, self._backlog, "Kafka gave no answer"
        try:
            while not context.stopping.is_set():
                context.health.beat()
                await commands.apply(context, self._kafka, ledger, view)
                reading.take_edits(ledger)
                if not (full := backlog.full):
                    await reading.ahead()
                reading.tell(backlog)
                if reading.making or self._intake.arrived.is_set():
                    await self._publish(context, ledger)
                elif reading.rests and context.until_idle:
                    await ledger.idle(context.process.run_id, reading.declared.requests, reading.stopped)
                    reading.refuse_stopped(self._strict)
                    return
                else:
                    await reading.news(context.stopping, full=full)
        except Fatal as error:
            closing = str(error)
            raise
        finally:
            self._intake.close("ingest stops" if context.stopping.is_set() else closing)
            await reading.close()

    async def _publish(self, context: Context, ledger: Ledger) -> None:
        """What was read and is made by now, and with it what was pushed meanwhile."""
        read = await self._reading.making.made() if self._reading.making else []
        for portion in ledger.portions(read + self._intake.take(self._settings.batch_records)):
            if context.stopping.is_set():
                return  # what is left is read again, or sent back
            context.health.beat()
            with context.health.unready_after(_SLOW_SECONDS, f"Kafka at {self._kafka.address} takes long to commit"):
                self._backlog.published(await ledger.publish(portion))
        self._backoff.reset()
        self._reading.published(read)


def make(environ: Mapping[str, str]) -> Ingest:
    """The service, from its settings and its sources file alone. Raises SettingsError."""
    settings, kafka = load(IngestSettings, environ), load(KafkaSettings, environ)
    check(settings)
    return Ingest(settings, Kafka(kafka), sources.load(settings.sources_file, settings.roots))
