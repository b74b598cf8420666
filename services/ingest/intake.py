"""Records that are pushed: made into prompts as they come, and held until the next transaction takes them along."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from services.ingest.lines import Line, Mark
from services.ingest.prompts import Made
from services.ingest.reader import Batch
from services.ingest.selection import selected
from services.ingest.sources import Source
from services.kernel.errors import Retry, TokenhaulError

FILE = "http"
"""What stands for a file in the cursor and the references of pushed records; rows count on for ever."""
_AT_ONCE = 4  # chunks of records being tokenized


class Part(msgspec.Struct, eq=False):
    """A batch and what became of it; `published` waits for the ids of its prompts that were new."""

    batch: Batch
    made: Made
    published: asyncio.Future[frozenset[bytes]] | None = None


class Result(msgspec.Struct, omit_defaults=True):
    """What became of a pushed record. `ids`: its prompts, hexadecimal; they are on the topic, new or not."""

    line: int
    status: str
    ids: list[str] = []
    reason: str = ""
    detail: str = ""


class LimitReached(Exception):
    """The source takes no more."""


class Intake:
    """The way in for pushed records. While it is closed `push` raises Retry."""

    def __init__(self, make: Callable[[Batch], Made], fail: Callable[[BaseException], None]) -> None:
        self.arrived = asyncio.Event()
        self._make, self._fail = make, fail
        self._sources: dict[str, Source] = {}
        self._marks: dict[str, Mark] = {}
        self._rows: dict[str, int] = {}
        self._pending: Counter[str] = Counter()  # records on their way that no mark counts yet
        self._waiting: list[Part] = []
        self._in_hand: list[Part] = []
        self._closed = "ingest has not begun yet"
        self._making = asyncio.Semaphore(_AT_ONCE)

    @property
    def closed(self) -> str:
        """Why nothing is taken now; empty when it is."""
        return self._closed

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources that records may be pushed to."""
        return self._sources

    def open(self, sources: Sequence[Source], marks: Mapping[str, Mapping[str, Mark]]) -> None:
        """Take records for those of `sources` that say so. What was made for a source that asks otherwise now is sent
        back."""
        self._sources = {source.name: source for source in sources if source.http}
        edited = [part for part in self._waiting if self._sources.get(part.batch.source.name) != part.batch.source]
        self._waiting = [part for part in self._waiting if part not in edited]
        self._forget(edited)
        _send_back(edited, "the sources file was edited")
        self._marks = {name: marks.get(name, {}).get(FILE, Mark()) for name in self._sources}
        self._rows = {name: max(mark.row, self._rows.get(name, 0)) for name, mark in self._marks.items()}
        self._closed = ""

    def close(self, because: str) -> None:
        """Take nothing; whoever waits is told that it is not known what became of its records."""
        self._closed = because
        self._forget(self._waiting)
        waiting, self._waiting, self._in_hand = self._in_hand + self._waiting, [], []
        _send_back(waiting, because)

    async def push(self, name: str, records: Sequence[tuple[int, bytes, bool]]) -> list[Result]:
        """Publish (line, record, whether it was too long), up to the limit of the source; what became of each that was
        taken, once it is certain.

        Raises Retry when it is not, LimitReached when the source takes no more."""
        source = self._source(name)
        first = self._rows[name] + 1
        lines = [Line(row, data, too_long) for row, (_, data, too_long) in enumerate(records, first)]
        chosen = selected(source.sample, lines)
        if source.limit is not None and len(chosen) > (room := self._room(source, source.limit)):
            if room <= 0:
                raise LimitReached(f"source {name} has reached its limit of {source.limit} records")
            chosen = chosen[:room]
            lines = lines[: chosen[-1].row - first + 1]
            records = records[: len(lines)]
        self._rows[name] += len(records)
        size = sum(len(data) for _, data, _ in records)
        batch = Batch(source, FILE, chosen, Mark(offset=size, row=lines[-1].row, records=len(chosen)))
        self._pending[name] += len(chosen)
        try:
            part = await self._made(batch)
        except BaseException:
            self._pending[name] -= len(chosen)
            raise
        self._waiting.append(part)
        self.arrived.set()
        assert part.published is not None
        new = await part.published
        return _results(records, first, chosen, part.made, new)

    async def _made(self, batch: Batch) -> Part:
        name = batch.source.name
        async with self._making:
            self._source(name)
            try:
                made = await asyncio.to_thread(self._make, batch)
            except TokenhaulError as error:  # Fatal, or a process of the tokenizer died: so for files, too
                self._fail(error)
                raise Retry("closed", str(error)) from error
        if self._source(name) != batch.source:
            raise Retry("closed", "the sources file was edited")
        return Part(batch, made, asyncio.get_running_loop().create_future())

    def _room(self, source: Source, limit: int) -> int:
        return limit - self._marks[source.name].records - self._pending[source.name]

    def take(self, most_prompts: int) -> list[Part]:
        """What waits, in its order, until there are `most_prompts`. Its marks follow one another from now on."""
        taken, count = [], 0
        while self._waiting and count < most_prompts:
            part = self._waiting.pop(0)
            name, new = part.batch.source.name, part.batch.mark
            old = self._marks.get(name, Mark())
            self._pending[name] -= new.records
            self._marks[name] = Mark(
                offset=old.offset + new.offset, row=max(old.row, new.row), records=old.records + new.records
            )
            part.batch = msgspec.structs.replace(part.batch, mark=self._marks[name])
            taken.append(part)
            count += max(1, len(part.made.prompts))
        if not self._waiting:
            self.arrived.clear()
        self._in_hand = taken
        return list(taken)

    def _forget(self, waiting: Sequence[Part]) -> None:
        for part in waiting:
            self._pending[part.batch.source.name] -= part.batch.mark.records

    def _source(self, name: str) -> Source:
        if self._closed:
            raise Retry("closed", self._closed)
        if name not in self._sources:
            raise Retry("closed", f"source {name} is not taken any more")
        return self._sources[name]


def _send_back(parts: Sequence[Part], because: str) -> None:
    for part in parts:
        if part.published and not part.published.done():
            part.published.set_exception(Retry("closed", because))


def _results(
    records: Sequence[tuple[int, bytes, bool]], first: int, chosen: Sequence[Line], made: Made, new: frozenset[bytes]
) -> list[Result]:
    in_sample = {line.row for line in chosen}
    ids: dict[int, list[bytes]] = {}
    for ready in made.prompts:
        ids.setdefault(ready.row, []).append(ready.id)
    letters = {letter.row: letter for letter in reversed(made.letters)}
    results = []
    for row, (line, _, _) in enumerate(records, first):
        result = Result(line, "refused", [id.hex() for id in ids.get(row, [])])
        if letter := letters.get(row):
            result.reason, result.detail = letter.reason, letter.detail
        if row not in in_sample:
            result.status = "left_out"
        elif result.ids:
            result.status = "published" if any(id in new for id in ids[row]) else "repeated"
        results.append(result)
    return results
