"""Batches of lines from all files of all sources, by weight, so that none waits for a huge one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping

import msgspec

from services.ingest import places
from services.ingest.lines import Line, Lines, Mark
from services.ingest.places import Entry
from services.ingest.selection import selected
from services.ingest.sources import Source, Sources
from services.ingest.stored import Broken
from services.kernel.errors import Retry

log = logging.getLogger("tokenhaul.ingest")

_MOST_LINES = 100_000  # read for one batch, when few of them belong to the sample


class Batch(msgspec.Struct, frozen=True):
    """Lines of one file, and how far it is read with them."""

    source: Source
    file: str
    lines: list[Line]
    mark: Mark


class Progress(msgspec.Struct, frozen=True):
    """Of a source: bytes read, bytes there are, rows (where all of its files say how many), files that are broken."""

    read: int
    size: int
    rows: int | None
    broken: int


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
        self._turns = [_Turn(source, marks.get(source.name, {})) for source in sources.sources]
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

    def _read(self, turn: _Turn) -> Batch | None:
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

    def _put_aside(self, turn: _Turn, name: str, error: Broken | OSError) -> None:
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


class _File:
    """An input with how far it is read. `done`: the version that was read to its end."""

    def __init__(self, entry: Entry, mark: Mark) -> None:
        self.entry, self.mark = entry, mark
        self.input = entry.make()
        self.done: Hashable = None
        self.broken = False

    def update(self, entry: Entry) -> None:
        if entry.version != self.entry.version:
            self.input.close()
            self.entry, self.input, self.broken = entry, entry.make(), False


class _Turn:
    """A source with the files it has now; `waiting` are those not yet read to their ends, in order."""

    def __init__(self, source: Source, marks: Mapping[str, Mark]) -> None:
        self.source = source
        self.files: dict[str, _File] = {}
        self.waiting: list[str] = []
        self.given = 0.0
        self.stopped = ""
        self._marks = dict(marks)
        self._by_inode = {mark.inode: mark for mark in marks.values() if mark.inode}
        self._records = sum(mark.records for mark in marks.values())
        self._passed_over: set[str] = set()
        self.progress = Progress(0, 0, None, 0)

    @property
    def room(self) -> int | None:
        """How many records the source may still give. None: any number."""
        return None if self.source.limit is None else max(0, self.source.limit - self._records)

    def look(self, found: places.Found, quiet_seconds: float) -> None:
        """Take over what there is now. A file that does not grow by lines waits until nobody wrote it for so long: it
        would be read from its start again and again."""
        for name, reason in found.passed_over.items():
            if name not in self._passed_over:
                log.warning(
                    "source %s: %r is passed over: %s", self.source.name, name, reason, extra={"action": "passed_over"}
                )
        self._passed_over.update(found.passed_over)
        for name in self.files.keys() - found.entries.keys():
            self.files.pop(name).input.close()
        for name, entry in found.entries.items():
            if file := self.files.get(name):
                file.update(entry)
            else:
                self.files[name] = _File(entry, self._marks.get(name, Mark()))
        self.files = {name: self.files[name] for name in found.entries}
        self.waiting = [
            name for name, file in self.files.items()
            if file.done != file.entry.version and _is_quiet(file.entry, quiet_seconds)
        ]  # fmt: skip
        self._measure()

    def read(self, name: str, max_lines: int, take_rest: bool) -> Lines:
        """The next lines of a file, those of the sample alone."""
        file = self.files[name]
        mark = self._found_again(file)
        taken = file.input.read(mark, max_lines=max_lines, take_rest=take_rest)
        if taken.replaced:
            log.warning(
                "source %s: %s was replaced, it is read again from its start (what is published already is not "
                "published again)", self.source.name, name, extra={"action": "file_replaced"},
            )  # fmt: skip
        lines = selected(self.source.sample, taken.lines)
        before = Mark() if taken.replaced else mark
        new = msgspec.structs.replace(taken.mark, inode=file.entry.inode, records=before.records + len(lines))
        read = self.progress.read + new.offset - before.offset
        self.progress = msgspec.structs.replace(self.progress, read=read, size=max(read, self.progress.size))
        self._records += len(lines)
        file.mark = self._marks[name] = new
        if new.inode:
            self._by_inode[new.inode] = new
        return Lines(lines, new, taken.replaced)

    def done(self, name: str) -> None:
        """Nothing more to read of a file, until it changes."""
        self.files[name].done = self.files[name].entry.version
        self.files[name].input.close()
        self.waiting.remove(name)

    def later(self, name: str) -> None:
        """Read on in a file after the next look."""
        self.files[name].input.close()
        self.waiting.remove(name)

    def stop(self, because: str) -> None:
        """Take nothing more."""
        self.stopped = self.stopped or because
        self.waiting = []
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        for file in self.files.values():
            file.input.close()

    def _measure(self) -> None:
        files = self.files.values()
        rows = [file.input.rows for file in files]
        known = sum(filter(None, rows)) if rows and None not in rows else None
        read = sum(file.mark.offset for file in files)
        size = sum(max(file.mark.offset, file.entry.size) for file in files)
        self.progress = Progress(read, size, known, sum(file.broken for file in files))

    def _found_again(self, file: _File) -> Mark:
        """Where to read on: in a file that was renamed, where it was left under its old name."""
        other = self._by_inode.get(file.entry.inode)
        if other is None or other.offset <= file.mark.offset or (file.mark.offset and file.input.is_same(file.mark)):
            return file.mark
        return msgspec.structs.replace(other, records=0) if file.input.is_same(other) else file.mark


def _is_quiet(entry: Entry, seconds: float) -> bool:
    # A file from the future (another machine's clock) is not written now either.
    return entry.modified is None or abs(time.time() - entry.modified) >= seconds
