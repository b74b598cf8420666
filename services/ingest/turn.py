"""One source's files: how far each is read, which wait to be read, and which are known from before."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping

import msgspec

from services.ingest import places
from services.ingest.lines import Lines, Mark
from services.ingest.places import Entry
from services.ingest.selection import selected
from services.ingest.sources import Source

log = logging.getLogger("tokenhaul.ingest")


class Progress(msgspec.Struct, frozen=True):
    """Of a source: bytes read, bytes there are, rows (where all of its files say how many), files that are broken."""

    read: int
    size: int
    rows: int | None
    broken: int


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


class Turn:
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
