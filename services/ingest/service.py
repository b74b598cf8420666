"""tokenhaul ingest: records of files and requests become prompts on the prompts topic, each exactly once.

    files -> lines -> conversation -> text -> ids -> prompt -> one transaction with the file's cursor
    POST /v1/prompts -> lines -> ...                        -> ... the next transaction takes them along

Reading and tokenizing run ahead in threads; publishing goes batch by batch, in the order of reading.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack

from aiokafka.errors import KafkaError

from services.ingest import commands as given
from services.ingest import sources
from services.ingest.backlog import Backlog
from services.ingest.declaration import Declaration, Upkeep
from services.ingest.http import PromptsApi, served
from services.ingest.intake import Intake
from services.ingest.ledger import Ledger
from services.ingest.making import Making
from services.ingest.metrics import IngestMetrics
from services.ingest.reader import Reader
from services.ingest.settings import IngestSettings, check
from services.ingest.sources import Sources
from services.kernel import control, topics
from services.kernel.control import ControlView
from services.kernel.errors import Fatal, Retry
from services.kernel.kafka import Kafka, KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.retry import Backoff, any_set_within, set_within
from services.kernel.settings import load

log = logging.getLogger("tokenhaul.ingest")

_SLOW_SECONDS = 5.0
_FULL_SECONDS = 0.5


class Ingest:
    """Reads, tokenizes, publishes; ends when all is read (`--until-idle`) or when it is asked to."""

    _now: Declaration
    _intake: Intake
    _upkeep: Upkeep

    def __init__(self, settings: IngestSettings, kafka: Kafka, declared: Sources, *, strict: bool = False) -> None:
        """`strict`: a source that stopped is an error at the end."""
        self.metrics = IngestMetrics()
        self._settings, self._kafka, self._declared, self._strict = settings, kafka, declared, strict
        self._backoff = Backoff(base=0.5, cap=15.0)
        self._backlog = Backlog(kafka, settings.backlog)

    async def run(self, context: Context) -> None:
        """See services.kernel.lifecycle.Service."""
        context.health.set_ready(because=f"waiting for Kafka at {self._kafka.address}")
        self._intake = Intake(lambda batch: self._now.make(batch), context.fail)
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
        if not hasattr(self, "_now"):
            dataset = await topics.check(self._kafka)
            self._now = await asyncio.to_thread(Declaration.prepare, self._settings, self._declared, dataset)
            self._upkeep = Upkeep(self._settings, self._now, self.metrics)
            if not context.until_idle:
                context.spawn(self._upkeep.follow())
            if self._settings.backlog:
                context.spawn(self._backlog.follow())
        id = f"{self._kafka.settings.prefix}.ingest"
        async with (
            self._kafka.started(lambda: self._kafka.producer(transactional_id=id), context.stopping) as producer,
            control.following(self._kafka, context.spawn) as commands,
        ):
            ledger = Ledger(self._kafka, producer, self._now.dataset.partitions, self.metrics)
            await ledger.recover()
            await ledger.announce(self._now.probes)
            reader = self._begin(context, ledger, self._now)
            context.begin()
            context.health.set_ready()
            await self._haul(context, reader, ledger, commands)

    def _begin(self, context: Context, ledger: Ledger, declared: Declaration) -> Reader:
        """Read on where each file was left. Raises Fatal when a source asks otherwise than it did."""
        marks = ledger.begin(declared.sources.sources, declared.requests)
        self._now = declared
        self._intake.open(declared.sources.sources, marks)
        return Reader(
            declared.sources,
            marks,
            batch_records=self._settings.batch_records,
            scan_seconds=self._settings.scan_seconds,
            take_rest=context.until_idle,
        )

    async def _haul(self, context: Context, reader: Reader, ledger: Ledger, commands: ControlView) -> None:
        making, look_at, now = Making(), -math.inf, asyncio.get_running_loop().time
        try:
            while not context.stopping.is_set():
                context.health.beat()
                await given.apply(context, self._kafka, ledger, commands)
                if not making and (declared := self._upkeep.take()):
                    reader, look_at = self._switch(context, reader, ledger, declared), -math.inf
                ended, full = now() < look_at, self._backlog.full
                self.metrics.paused.set(full)
                while making.room and not (ended or full or self._upkeep.waits):
                    if batch := await asyncio.to_thread(reader.next):
                        making.start(self._now.make, batch)
                        self.metrics.records_in.inc(len(batch.lines))
                    else:
                        ended, look_at = True, now() + self._settings.scan_seconds
                self.metrics.progress(reader.progress, reader.stopped, making.records, self._backlog.size)
                if making or self._intake.arrived.is_set():
                    await self._publish(context, reader, ledger, making)
                elif ended and context.until_idle:
                    await ledger.idle(context.process.run_id, self._now.requests, reader.stopped)
                    return self._conclude(reader)
                else:
                    wait = _FULL_SECONDS if full else max(0.0, look_at - now())
                    await any_set_within([context.stopping, self._intake.arrived, self._upkeep.arrived], wait)
        finally:
            self._intake.close("ingest stops" if context.stopping.is_set() else "Kafka gave no answer")
            await making.cancel()
            reader.close()

    async def _publish(self, context: Context, reader: Reader, ledger: Ledger, making: Making) -> None:
        """The batch that was read first, and with it what was pushed meanwhile."""
        parts = [await making.first()] if making else []
        parts += self._intake.take(self._settings.batch_records)
        with context.health.unready_after(_SLOW_SECONDS, f"Kafka at {self._kafka.address} takes long to commit"):
            self._backlog.published(await ledger.publish(parts))
        self._backoff.reset()
        if making:
            making.done()
            if why := self._now.patience[parts[0].batch.source.name].after(parts[0].batch.lines, parts[0].made):
                reader.stop(parts[0].batch.source.name, why)

    def _switch(self, context: Context, reader: Reader, ledger: Ledger, declared: Declaration) -> Reader:
        """Go on with another sources file, unless it asks otherwise about what is read already."""
        try:
            new = self._begin(context, ledger, declared)
        except Fatal as refusal:
            self._upkeep.refused(refusal)
            return reader
        self._upkeep.taken()
        reader.close()
        return new

    def _conclude(self, reader: Reader) -> None:
        if self._strict and reader.stopped:
            raise Fatal("\n".join(f"source {name} stopped: {why}" for name, why in reader.stopped.items()))


def make(environ: Mapping[str, str]) -> Ingest:
    """The service, from its settings and its sources file alone. Raises SettingsError."""
    settings, kafka = load(IngestSettings, environ), load(KafkaSettings, environ)
    check(settings)
    return Ingest(settings, Kafka(kafka), sources.load(settings.sources_file, settings.roots))
