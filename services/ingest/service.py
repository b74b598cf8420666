"""tokenhaul ingest: lines of the sources' files become prompts on the prompts topic, each exactly once.

    files -> lines -> conversation -> text -> ids -> prompt -> one transaction with the file's cursor

Reading and tokenizing run ahead in threads; publishing goes batch by batch, in the order of reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from aiokafka.errors import KafkaError

from schemas.control import Dataset
from services.ingest import preflight, regenerate, sources
from services.ingest.ledger import Ledger
from services.ingest.metrics import IngestMetrics
from services.ingest.patience import Patience
from services.ingest.prompts import Made, PromptMaker
from services.ingest.reader import Batch, Reader
from services.ingest.settings import IngestSettings
from services.ingest.sources import Sources
from services.kernel import control, topics
from services.kernel.control import ControlView
from services.kernel.errors import Retry, SettingsError
from services.kernel.kafka import Kafka, KafkaSettings
from services.kernel.lifecycle import Context
from services.kernel.retry import Backoff
from services.kernel.settings import load

log = logging.getLogger("tokenhaul.ingest")

# While one batch is encoded (Rust, all cores) the next one is rendered (Python, one core) and a third is published.
AHEAD = 2
SLOW_SECONDS = 5.0


class Ingest:
    """Reads, tokenizes, publishes; ends when all is read (`--until-idle`) or when it is asked to."""

    _dataset: Dataset

    def __init__(self, settings: IngestSettings, kafka: Kafka, declared: Sources) -> None:
        self.metrics = IngestMetrics()
        self._settings, self._kafka, self._declared = settings, kafka, declared
        self._makers: dict[str, PromptMaker] = {}
        self._patience = {source.name: Patience(source) for source in declared.sources}
        self._backoff = Backoff(base=0.5, cap=15.0)

    async def run(self, context: Context) -> None:
        """See services.kernel.lifecycle.Service."""
        context.health.set_ready(because=f"waiting for Kafka at {self._kafka.address}")
        while not context.stopping.is_set():
            try:
                async with AsyncExitStack() as stack:
                    reader, ledger = await self._take_over(context, stack)
                    commands = await stack.enter_async_context(control.following(self._kafka, context.spawn))
                    context.begin()
                    context.health.set_ready()
                    await self._haul(context, reader, ledger, commands)
                return
            except (Retry, KafkaError) as error:
                self.metrics.retried(error.cause if isinstance(error, Retry) else "kafka")
                context.health.set_ready(because=f"Kafka at {self._kafka.address}: {error!r}")
                wait = self._backoff.next()
                log.warning("%r; trying again in %.1f s", error, wait, extra={"action": "retry"})
                await _pause(context, wait)

    async def _take_over(self, context: Context, stack: AsyncExitStack) -> tuple[Reader, Ledger]:
        """Fence a predecessor and find out where it was. Kafka may be away and the topics long: it takes its time."""
        if not self._makers:
            self._dataset = await topics.check(self._kafka)
            self._makers = await asyncio.to_thread(
                preflight.prepare, self._settings, self._declared, self._dataset.model
            )
        transactional_id = f"{self._kafka.settings.prefix}.ingest"
        producer = await stack.enter_async_context(
            self._kafka.started(lambda: self._kafka.producer(transactional_id=transactional_id), context.stopping)
        )
        ledger = Ledger(self._kafka, producer, self._dataset.partitions, self.metrics)
        await ledger.recover()
        requests = {name: maker.request for name, maker in self._makers.items()}
        reader = Reader(
            self._declared,
            ledger.begin(self._declared.sources, requests),
            batch_records=self._settings.batch_records,
            scan_seconds=self._settings.scan_seconds,
            take_rest=context.until_idle,
        )
        await asyncio.to_thread(reader.scan)
        return reader, ledger

    async def _haul(self, context: Context, reader: Reader, ledger: Ledger, commands: ControlView) -> None:
        making: deque[tuple[Batch, asyncio.Task[Made]]] = deque()
        try:
            while not context.stopping.is_set():
                context.health.beat()
                await regenerate.apply(context, self._kafka, ledger, commands)
                while len(making) < AHEAD and (batch := await asyncio.to_thread(reader.next)):
                    making.append((batch, asyncio.create_task(asyncio.to_thread(self._make, batch))))
                    self.metrics.records_in.inc(len(batch.lines))
                self.metrics.progress(reader.progress, reader.stopped, sum(len(batch.lines) for batch, _ in making))
                if making:
                    batch, task = making[0]
                    made = await task
                    with self._unready_when_slow(context):
                        await ledger.publish(batch, made)
                    making.popleft()
                    self._backoff.reset()
                    if why := self._patience[batch.source.name].after(batch.lines, made):
                        reader.stop(batch.source.name, why)
                elif context.until_idle:
                    await ledger.idle(context.process.run_id, self._makers, reader.stopped)
                    return
                else:
                    await _pause(context, self._settings.scan_seconds)
        finally:
            for _, task in making:
                task.cancel()
            await asyncio.gather(*(task for _, task in making), return_exceptions=True)
            reader.close()

    @contextmanager
    def _unready_when_slow(self, context: Context) -> Iterator[None]:
        because = f"Kafka at {self._kafka.address} takes long over a transaction"
        late = asyncio.get_running_loop().call_later(SLOW_SECONDS, lambda: context.health.set_ready(because=because))
        try:
            yield
        finally:
            late.cancel()
        context.health.set_ready()

    def _make(self, batch: Batch) -> Made:
        maker = self._makers[batch.source.name]
        if not maker.proven:  # it held nothing at the start
            preflight.prove(maker, batch.file, batch.lines[: preflight.RECORDS])
        return maker.make(batch.file, batch.lines)


async def _pause(context: Context, seconds: float) -> None:
    try:
        await asyncio.wait_for(context.stopping.wait(), seconds)
    except TimeoutError:
        return


def make(environ: Mapping[str, str]) -> Ingest:
    """The service, from its settings and its sources file alone. Raises SettingsError."""
    settings, kafka = load(IngestSettings, environ), load(KafkaSettings, environ)
    if not Path(settings.tokenizer).is_dir():
        raise SettingsError(f"TOKENHAUL_INGEST_TOKENIZER={settings.tokenizer!r} is no directory")
    return Ingest(settings, Kafka(kafka), sources.load(settings.sources_file, settings.roots))
