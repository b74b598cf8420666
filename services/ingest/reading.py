"""What is read at the moment: the sources as they are declared, a reader of them, and the prompts being made ahead."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from services.ingest.backlog import Backlog
from services.ingest.declaration import Declaration, Upkeep
from services.ingest.intake import Intake, Part
from services.ingest.ledger import Ledger
from services.ingest.making import Making
from services.ingest.metrics import IngestMetrics
from services.ingest.reader import Reader
from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal
from services.kernel.retry import any_set_within

_FULL_SECONDS = 0.5


class Reading:
    """Begins anew with each connection to Kafka, and with each edit of the sources file."""

    reader: Reader

    def __init__(
        self,
        settings: IngestSettings,
        declared: Declaration,
        intake: Intake,
        metrics: IngestMetrics,
        *,
        take_rest: bool,
    ) -> None:
        """`take_rest`: nobody writes to the files any more, a last line without its end is one."""
        self.declared, self.upkeep = declared, Upkeep(settings, declared, metrics)
        self.making = Making()
        self._settings, self._intake, self._metrics, self._take_rest = settings, intake, metrics, take_rest
        self._look_at = -math.inf

    def begin(self, ledger: Ledger) -> None:
        """Read on where each file was left. Raises Fatal when a source asks otherwise than it did."""
        self._begin(ledger, self.declared)

    def take_edits(self, ledger: Ledger) -> None:
        """Go on with another sources file, unless it asks otherwise about what is read already."""
        if self.making or not (declared := self.upkeep.take()):
            return
        before = self.reader
        try:
            self._begin(ledger, declared)
        except Fatal as refusal:
            self.upkeep.refused(refusal)
        else:
            self.upkeep.taken()
            before.close()

    async def ahead(self) -> None:
        """Make prompts of what can be read now, as far as they may run ahead and nothing waits to be published."""
        while self.making.room and not (self.rests or self.upkeep.waits):
            if batch := await asyncio.to_thread(self.reader.next):
                self.making.start(self.declared.make, batch)
                self._metrics.records_in.inc(len(batch.lines))
                if self.making.first_is_made or self._intake.arrived.is_set():
                    return
            else:
                self._look_at = asyncio.get_running_loop().time() + self._settings.scan_seconds

    @property
    def rests(self) -> float:
        """Seconds until there is another look for what is new; 0 while there is something to read."""
        return max(0.0, self._look_at - asyncio.get_running_loop().time())

    def published(self, parts: Sequence[Part]) -> None:
        """Batches that were read are on the topic: next. A source with too many bad records stops."""
        for part in parts:
            self.making.done()
            if why := self.declared.patience[part.batch.source.name].after(part.batch.lines, part.made):
                self.reader.stop(part.batch.source.name, why)

    @property
    def stopped(self) -> dict[str, str]:
        """{source: why nothing more is taken of it}."""
        return self.reader.stopped

    def refuse_stopped(self, strict: bool) -> None:
        """`strict`: raises Fatal when a source stopped."""
        if strict and self.stopped:
            raise Fatal("\n".join(f"source {name} stopped: {why}" for name, why in self.stopped.items()))

    def tell(self, backlog: Backlog) -> None:
        """How far all is, to metrics."""
        self._metrics.paused.set(backlog.full)
        self._metrics.progress(self.reader.progress, self.stopped, self.making.records, backlog.size)

    async def news(self, stopping: asyncio.Event, *, full: bool) -> None:
        """Wait until there may be something to do; `full`: there is, for later."""
        arrived = [stopping, self._intake.arrived, self.upkeep.arrived]
        await any_set_within(arrived, _FULL_SECONDS if full else self.rests)

    async def close(self) -> None:
        """What was not published is read again."""
        await self.making.cancel()
        self.reader.close()

    def _begin(self, ledger: Ledger, declared: Declaration) -> None:
        marks = ledger.begin(declared.sources.sources, declared.requests)
        self.declared, self._look_at = declared, -math.inf
        self._intake.open(declared.sources.sources, marks)
        self.reader = Reader(
            declared.sources,
            marks,
            batch_records=self._settings.batch_records,
            scan_seconds=self._settings.scan_seconds,
            take_rest=self._take_rest,
        )
