"""What is to be read and asked, ready to work; and how it follows the sources file while that is edited."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from schemas.control import Dataset, Probes
from services.ingest import preflight, probes, sources
from services.ingest.metrics import IngestMetrics
from services.ingest.patience import Patience
from services.ingest.prompts import Made, PromptMaker
from services.ingest.reader import Batch
from services.ingest.request import Request
from services.ingest.settings import IngestSettings
from services.ingest.sources import Sources
from services.ingest.workshop import Workshop
from services.kernel.errors import Fatal, Retry

log = logging.getLogger("tokenhaul.ingest")


class Declaration(msgspec.Struct, frozen=True):
    """Sources with the makers of their prompts."""

    dataset: Dataset
    sources: Sources
    makers: dict[str, PromptMaker]
    patience: dict[str, Patience]
    probes: Probes
    workshop: Workshop

    @classmethod
    def prepare(
        cls, settings: IngestSettings, declared: Sources, dataset: Dataset, workshop: Workshop | None = None
    ) -> Declaration:
        """`workshop`: the tokenizer and what else is loaded already. Takes seconds: not on the loop. Raises Fatal for
        what preflight refuses."""
        if workshop is None:
            # Templates that print a date are told this one: the same whenever a prompt is made.
            created = datetime.fromtimestamp(dataset.created_at, UTC).date().isoformat()
            workshop = Workshop(settings, dataset.model, created)
        makers = preflight.prepare(workshop, declared)
        patience = {source.name: Patience(source) for source in declared.sources}
        return cls(dataset, declared, makers, patience, probes.make(makers.values()), workshop)

    @property
    def requests(self) -> dict[str, Request]:
        """What is asked, by source."""
        return {name: maker.request for name, maker in self.makers.items()}

    def make(self, batch: Batch) -> Made:
        """The prompts of a batch. CPU for as long as it takes: not on the loop."""
        maker = self.makers[batch.source.name]
        if not maker.proven:  # it held nothing at the start
            preflight.prove(maker, batch.file, batch.lines[: preflight.RECORDS])
        return maker.make(batch.file, batch.lines)


class Upkeep:
    """Follows the sources file: a ConfigMap swaps a symlink, an editor writes a new file. What cannot be taken is told
    of, and the work goes on as it was declared before."""

    def __init__(self, settings: IngestSettings, now: Declaration, metrics: IngestMetrics) -> None:
        self.arrived = asyncio.Event()
        self._settings, self._dataset, self._workshop, self._metrics = settings, now.dataset, now.workshop, metrics
        self._text = _read(settings.sources_file)
        self._told, self._faulty = "", False
        self._next: Declaration | None = None

    @property
    def waits(self) -> bool:
        """Whether a new declaration waits to be taken."""
        return self._next is not None

    def take(self) -> Declaration | None:
        """The new declaration, once."""
        taken, self._next = self._next, None
        self.arrived.clear()
        return taken

    async def follow(self) -> None:
        """For ever: look at the file, and prepare what it declares."""
        while True:
            await asyncio.sleep(self._settings.scan_seconds)
            try:
                if self._next is None and (declared := await asyncio.to_thread(self._changed)):
                    self._next = await asyncio.to_thread(
                        Declaration.prepare, self._settings, declared, self._dataset, self._workshop
                    )
                    self.arrived.set()
            except Fatal as refusal:
                self.refused(refusal)
            except Retry as error:
                log.warning("the sources file was edited: %s", error, extra={"action": "retry"})
                self._text = None  # it is looked at again

    def taken(self) -> None:
        """It is what is done from now on."""
        self._told = ""
        self._metrics.reload_refused.set(0)
        log.info("the sources file was edited and is taken", extra={"action": "reload"})

    def refused(self, refusal: Fatal) -> None:
        """Say once why it is not taken."""
        self._metrics.reload_refused.set(1)
        if str(refusal) != self._told:
            log.error("the sources file was edited and is not taken: %s", refusal, extra={"action": "reload_refused"})
        self._told = str(refusal)

    def _changed(self) -> Sources | None:
        """What the file declares, when that is news. A file with a fault is looked at again: what it names may come."""
        text = _read(self._settings.sources_file)
        if text == self._text and self._faulty:  # put back to what is done
            self._faulty, self._told = False, ""
            self._metrics.reload_refused.set(0)
        if text in (None, self._text):
            return None
        self._faulty = True
        declared = sources.load(self._settings.sources_file, self._settings.roots)
        self._faulty, self._text = False, text
        return declared


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None  # in the middle of being replaced
