"""Batches of lines from all files of all sources, by weight, so that none waits for a huge one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from services.ingest import places
from services.ingest.lines import Line, Mark
from services.ingest.sources import Source, Sources
from services.ingest.stored import Broken
from services.ingest.turn import Progress, Turn
from services.kernel.errors import Retry

log = logging.getLogger("tokenhaul.ingest")

_MOST_LINES = 100_000  # read for one batch, when few of them belong to the sample


class Batch(msgspec.Struct, frozen=True):
    """Lines of one file, and how far it is read with them."""

    source: Source
    file: str
    lines: list[Line]
    mark: Mark


class Reader:
    """Reads ahead of what is published. `marks` tells for each source how far its files were read before.

    Not for use by two threads at once. `take_rest`: this is the end, a last line without newline is one."""

    def __init__(
        self,
        sources: Sources,
        marks: Mapping[str, Mapping[str, Mark]],
        *,
        batch_records: int,
        scan_seconds: float,
        take_rest: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._clock = sources, clock
        self._turns = [Turn(source, marks.get(source.name, {})) for source in sources.sources]
        self._batch_records, self._scan_seconds, self._take_rest = batch_records, scan_seconds, take_rest
        self._scanned = -scan_seconds
        self._given = 0.0

    def next(self) -> Batch | None:
        """The next batch, or None when every file, looked for just now, is read to its end."""
        if self._clock() - self._scanned >= self._scan_seconds:
            self.scan()
        if batch := self._take():
            return batch
        self.scan()
        return self._take()

    def scan(self) -> None:
        """Look for files, and look again at those that changed since they were read to their ends."""
        self._scanned = self._clock()
        for turn in self._turns:
            if turn.stopped:
                continue
            try:
                found = places.find(turn.source.files, self._sources.folder, self._sources.roots)
                turn.look(found, 0.0 if self._take_rest else self._scan_seconds)
            except Retry as error:
                self._later(turn.source, error)

    def stop(self, source: str, because: str) -> None:
        """Take no more of a source. Its files are let go."""
        for turn in self._turns:
            if turn.source.name == source and not turn.stopped:
                log.error("source %s is stopped: %s", source, because, extra={"action": "source_stopped"})
                turn.stop(because)

    def close(self) -> None:
        """Let go of all files."""
        for turn in self._turns:
            turn.close()

    @property
    def stopped(self) -> dict[str, str]:
        """{source: why nothing more is taken of it}."""
        return {turn.source.name: turn.stopped for turn in self._turns if turn.stopped}

    @property
    def progress(self) -> dict[str, Progress]:
        """How far each source is."""
        return {turn.source.name: turn.progress for turn in self._turns}

    def _take(self) -> Batch | None:
        """From the source that got least for its weight. One that had nothing has no claim to what it missed."""
        for turn in sorted(self._turns, key=lambda turn: max(turn.given, self._given)):
            if batch := self._read(turn):
                self._given = max(turn.given, self._given)
                turn.given = self._given + max(1, len(batch.lines)) * turn.source.samples / turn.source.weight
                return batch
        return None

    def _read(self, turn: Turn) -> Batch | None:
        # One prompt for each sample: a batch is counted in prompts, so that a transaction stays short.
        max_lines = max(1, self._batch_records // turn.source.samples)
        if turn.room is not None:
            max_lines = min(max_lines, turn.room)
        elif turn.source.sample:
            max_lines = min(_MOST_LINES, int(max_lines / turn.source.sample.fraction))
        while turn.waiting and max_lines:
            name = turn.waiting[0]
            file = turn.files[name]
            before = file.mark
            try:
                taken = turn.read(name, max_lines, self._take_rest)
            except FileNotFoundError:
                log.warning("source %s: %s is gone", turn.source.name, name, extra={"action": "file_gone"})
                turn.waiting.pop(0)
                continue
            except Retry as error:
                self._later(turn.source, error)
                turn.later(name)
                continue
            except (Broken, OSError) as error:
                self._put_aside(turn, name, error)
                continue
            file.broken = False
            if taken.lines or msgspec.structs.replace(taken.mark, inode=before.inode) != before:
                return Batch(turn.source, name, taken.lines, taken.mark)
            turn.done(name)
        return None

    def _later(self, source: Source, error: Retry) -> None:
        """A store that does not answer holds up what is in it, until the next look. At the end of all it is waited
        for."""
        if self._take_rest:
            raise error
        log.warning("source %s: %s", source.name, error, extra={"action": "retry"})

    def _put_aside(self, turn: Turn, name: str, error: Broken | OSError) -> None:
        """A file that cannot be read may still be written; what the system refused it may give later, with no change to
        be seen in the file. At the end of all either is an error of its source."""
        file = turn.files[name]
        when = "when it changes" if isinstance(error, Broken) else "at every look"
        if isinstance(error, Broken):
            turn.done(name)
        else:
            turn.later(name)
        if not file.broken:
            log.error(
                "source %s: %s cannot be read: %s (it is tried again %s)", turn.source.name, name, error, when,
                extra={"action": "file_broken"},
            )  # fmt: skip
        file.broken = True
        if self._take_rest:
            self.stop(turn.source.name, f"{name} cannot be read: {error}")
