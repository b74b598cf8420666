"""Batches of lines from all files of all sources, a batch of each source in turn so that none waits for a huge one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.ingest.lines import Line, Mark, read_lines
from services.ingest.sources import Source, Sources, find_files

log = logging.getLogger("tokenhaul.ingest")


class Batch(msgspec.Struct, frozen=True):
    """Lines of one file, and how far it is read with them."""

    source: Source
    file: str
    lines: list[Line]
    mark: Mark


class Reader:
    """Reads ahead of what is published: where a file begins is asked once (`begin`), when it is first seen.

    Not for use by two threads at once. Raises what `begin` raises, and OSError for a file that cannot be read."""

    def __init__(
        self,
        sources: Sources,
        begin: Callable[[Source, str], Mark],
        *,
        batch_records: int,
        scan_seconds: float,
        take_rest: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = sources.folder
        self._turns = [_Turn(source) for source in sources.sources]
        self._begin, self._clock = begin, clock
        self._batch_records, self._scan_seconds, self._take_rest = batch_records, scan_seconds, take_rest
        self._scanned = -scan_seconds

    def next(self) -> Batch | None:
        """The next batch, or None when every file, looked for just now, is read to its end."""
        if self._clock() - self._scanned >= self._scan_seconds:
            self.scan()
        if batch := self._take():
            return batch
        self.scan()
        return self._take()

    def scan(self) -> None:
        """Look for files, and look again at those that were read to their ends."""
        self._scanned = self._clock()
        for turn in self._turns:
            found = find_files(turn.source, self._folder)
            for name in set(found.passed_over) - turn.passed_over:
                log.warning("source %s: %r is passed over: no .jsonl file, or no readable name", turn.source.name, name)
            turn.passed_over.update(found.passed_over)
            turn.files = {
                name: turn.files.get(name) or _File(path, self._begin(turn.source, name))
                for name, path in found.files.items()
            }
            turn.waiting = list(turn.files)
            turn.read_bytes = sum(file.mark.offset for file in turn.files.values())
            turn.size_bytes = sum(_size(file.path) for file in turn.files.values())

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        """{source: (bytes read, bytes of its files when last looked at)}."""
        return {t.source.name: (t.read_bytes, max(t.read_bytes, t.size_bytes)) for t in self._turns}

    def _take(self) -> Batch | None:
        for _ in self._turns:
            turn = self._turns.pop(0)
            self._turns.append(turn)
            if batch := self._read(turn):
                return batch
        return None

    def _read(self, turn: _Turn) -> Batch | None:
        # One prompt for each sample: a batch is counted in prompts, so that a transaction stays short.
        max_lines = max(1, self._batch_records // turn.source.samples)
        while turn.waiting:
            name = turn.waiting[0]
            file = turn.files[name]
            try:
                taken = read_lines(file.path, file.mark, max_lines=max_lines, take_rest=self._take_rest)
            except FileNotFoundError:
                log.warning("source %s: %s is gone", turn.source.name, name)
                turn.waiting.pop(0)
                continue
            if taken.replaced:
                log.warning(
                    "source %s: %s was replaced, it is read again from its start (what is published already is not "
                    "published again)", turn.source.name, name, extra={"action": "file_replaced"},
                )  # fmt: skip
            if taken.mark != file.mark:
                turn.read_bytes += taken.mark.offset - file.mark.offset
                file.mark = taken.mark
                return Batch(turn.source, name, taken.lines, taken.mark)
            turn.waiting.pop(0)
        return None


class _File:
    def __init__(self, path: Path, mark: Mark) -> None:
        self.path, self.mark = path, mark


class _Turn:
    """A source with the files it has now; `waiting` are those not yet read to their ends, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.files: dict[str, _File] = {}
        self.waiting: list[str] = []
        self.passed_over: set[str] = set()
        self.read_bytes = self.size_bytes = 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
