"""What Kafka holds of ingest's work, and the one way to add to it: a transaction of prompts, letters and a cursor.

A crash at any moment leaves a batch published with its cursor, or to be read again; prompts of it that are on the topic
already are known by their ids. So a restart neither loses nor repeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from aiokafka import AIOKafkaProducer

from schemas import ids
from schemas.control import PROBES_KEY, Idle, Probes, Regenerate, Replay, idle_key, regenerate_key, replay_key
from schemas.cursors import Cursor
from schemas.dead import DeadLetter
from schemas.prompts import Prompt
from services.ingest import cursor as cursors
from services.ingest import selection
from services.ingest.intake import Part
from services.ingest.lines import Mark
from services.ingest.metrics import IngestMetrics
from services.ingest.portions import Portion, portions
from services.ingest.prompts import Ready
from services.ingest.request import Request
from services.ingest.sources import Source
from services.ingest.transactions import TOOK_OVER, Message, Transactions
from services.kernel.codec import Decoder, Encoder
from services.kernel.control import ControlView
from services.kernel.errors import Fatal, Reject
from services.kernel.kafka import Kafka
from services.kernel.seen import SeenIds, pack

log = logging.getLogger("tokenhaul.ingest")

_READ_AT_ONCE = 4096


class Ledger:
    """Cursors and record ids as committed. `producer` is transactional and started, which fenced any predecessor."""

    def __init__(self, kafka: Kafka, producer: AIOKafkaProducer, partitions: int, metrics: IngestMetrics) -> None:
        self._kafka, self._metrics = kafka, metrics
        self._transactions = Transactions(producer, partitions, metrics)
        self._encoder = Encoder()
        self._seen = SeenIds()
        self._cursors: dict[tuple[str, str], Cursor] = {}
        self._requests: dict[str, Request] = {}
        self._view, self._announced = ControlView(), 0

    async def recover(self) -> None:
        """Read cursors and ids to their stable ends. Raises Fatal for a cursor this version cannot read."""
        decoder = Decoder(Cursor)
        async for record in self._kafka.read_all(self._kafka.topics.cursors):
            try:
                cursor = decoder.decode(record.value)
            except Reject as reject:
                where = f"{record.topic}, offset {record.offset}"
                raise Fatal(f"{where}: not a cursor this version of tokenhaul reads: {reject}") from reject
            self._cursors[cursor.source, cursor.file] = cursor
        found: list[bytes] = []
        async for record in self._kafka.read_all(self._kafka.topics.prompts):
            found += [value for name, value in record.headers if name == "id" and len(value) == ids.ID_BYTES]
            if len(found) >= _READ_AT_ONCE:
                await self._remember(found)
                found = []
        await self._remember(found)
        totals = cursors.totals(self._cursors.values(), {cursor.source for cursor in self._cursors.values()})
        self._metrics.recovered({source: total.published for source, total in totals.items()})
        log.info(
            "%d prompts are on the topic, %d files have a cursor", len(self._seen), len(self._cursors),
            extra={"action": "recovered"},
        )  # fmt: skip

    def begin(self, sources: Sequence[Source], requests: Mapping[str, Request]) -> dict[str, dict[str, Mark]]:
        """Where to read on in the files of each source. Raises Fatal when one asks otherwise than it did; then nothing
        has changed."""
        for declared in sources:
            self._check_raised(declared)
        marks: dict[str, dict[str, Mark]] = {source.name: {} for source in sources}
        chosen = {source.name: source for source in sources}
        for (name, file), stored in self._cursors.items():
            if source := chosen.get(name):
                marks[name][file] = cursors.mark_of(self._resume(source, requests[name], stored, file))
        self._requests = dict(requests)
        return marks

    @property
    def _used(self) -> int:
        """The highest revision of any command. Of which sources its rows were a command does not say."""
        return max((command.revision for command in self._view.regenerations()), default=0)

    def _check_raised(self, source: Source) -> None:
        """A revision that is new to a source must be above what commands used: readers keep all rows of the highest."""
        known = [cursor.revision for (name, _), cursor in self._cursors.items() if name == source.name]
        if known and max(known) < source.revision <= self._used:
            raise Fatal(
                f"source {source.name!r}: revision {source.revision} may be that of rows that `tokenhaul regenerate` "
                f"asked again: raise it to {self._used + 1} or more"
            )

    def _resume(self, source: Source, request: Request, stored: Cursor | None, file: str) -> Cursor:
        chosen = selection.fingerprint(source.sample)
        return cursors.resume(stored, source.name, file, source.revision, request.settings, chosen, self._used)

    def portions(self, parts: Sequence[Part]) -> Iterator[Portion]:
        """What of `parts` is new, in as many transactions as it takes; `publish` each of them, in their order."""
        return portions(parts, self._new([ready for part in parts for ready in part.made.prompts]))

    async def publish(self, portion: Portion) -> int:
        """One transaction: prompts, the letters of the parts that end with them, and the cursors behind those. A part
        that goes on has its prompts counted in its cursor, which stays where it is: after a crash the part is read
        again, and what is on the topic is known by its ids. How many prompts.

        Raises Retry when Kafka did not take it (this ledger and its producer are then done with), Fatal when another
        ingest took over."""
        changed: dict[tuple[str, str], Cursor] = {}

        def advance(part: Part, mark: Mark | None, published: int, repeated: int, refused: Mapping[str, int]) -> None:
            source, file = part.batch.source, part.batch.file
            key = source.name, file
            stored = changed.get(key) or self._resume(source, self._requests[source.name], self._cursors.get(key), file)
            changed[key] = cursors.advance(stored, mark or cursors.mark_of(stored), published, repeated, refused)

        for part, own in portion.prompts:
            advance(part, None, len(own), 0, {})
        for part, new in portion.ended:
            advance(part, part.batch.mark, 0, len(part.made.prompts) - len(new), part.made.refused)
        topics = self._kafka.topics
        prompts = [ready for _, own in portion.prompts for ready in own]
        letters = [letter for part, _ in portion.ended for letter in part.made.letters]
        await self._transactions.commit(
            [
                *(Message(topics.prompts, ready.value, Prompt, id=ready.id) for ready in prompts),
                *(Message(topics.dead, letter.value, DeadLetter, key=letter.key) for letter in letters),
                *(
                    Message(topics.cursors, self._encoder.encode(cursor), Cursor, key=cursors.key(*key))
                    for key, cursor in changed.items()
                ),
            ]
        )
        self._cursors |= changed
        await self._remember([ready.id for ready in prompts])
        self._told(portion)
        return len(prompts)

    def _told(self, portion: Portion) -> None:
        """Count what is committed, and tell who waits for it."""
        for part, own in portion.prompts:
            self._metrics.hauled(part.batch.source.name, 0, len(own), 0, {}, sum(ready.tokens for ready in own))
        for part, new in portion.ended:
            batch, made = part.batch, part.made
            repeated = len(made.prompts) - len(new)
            self._metrics.hauled(batch.source.name, len(batch.lines), 0, repeated, made.refused, 0)
            if part.published and not part.published.done():
                part.published.set_result(new)

    async def publish_again(self, prompts: Sequence[tuple[str, Ready]], done: Regenerate | None = None) -> None:
        """One transaction: those of `prompts` (each with its source) that are not on the topic, and that their command
        is done. Raises as `publish` does."""
        new = self._new([ready for _, ready in prompts])
        published = {ready.id: (source, ready) for source, ready in prompts if ready.id in new}
        messages = [
            Message(self._kafka.topics.prompts, ready.value, Prompt, id=id) for id, (_, ready) in published.items()
        ]
        if done:
            key = regenerate_key(done.command)
            messages.append(Message(self._kafka.topics.control, self._encoder.encode(done), Regenerate, key=key))
        await self._transactions.commit(messages)
        await self._remember(list(published))
        for source in {source for source, _ in prompts}:
            own = [ready for name, ready in published.values() if name == source]
            repeated = sum(name == source for name, _ in prompts) - len(own)
            self._metrics.hauled(source, 0, len(own), repeated, {}, sum(ready.tokens for ready in own))

    async def replay(self, prompts: Sequence[Ready], done: Replay) -> None:
        """One transaction: all of `prompts`, although they are on the topic, and that their command is done. Raises as
        `publish` does."""
        key = replay_key(done.command)
        await self._transactions.commit(
            [
                *(
                    Message(self._kafka.topics.prompts, ready.value, Prompt, id=ready.id, replay=key)
                    for ready in prompts
                ),
                Message(self._kafka.topics.control, self._encoder.encode(done), Replay, key=key),
            ]
        )
        self._metrics.records_out.inc(len(prompts))

    async def idle(self, run: str, sources: Iterable[str], stopped: Mapping[str, str]) -> None:
        """Say that this run's prompts are all on the topic, but for those of sources that are stopped. Raises as
        `publish` does."""
        totals = cursors.totals(self._cursors.values(), sources)
        totals |= {name: msgspec.structs.replace(totals[name], stopped=why) for name, why in stopped.items()}
        mark = Idle(run=run, sources=totals, created_at=time.time())
        await self._transactions.commit(
            [Message(self._kafka.topics.control, self._encoder.encode(mark), Idle, key=idle_key(run))]
        )

    async def announce(self, probes: Probes, view: ControlView) -> None:
        """Tell the generators what an engine's tokenizer must make, and a predecessor, by the same word, that it is
        not the one any more. Raises as `publish` does."""
        self._view, self._announced = view, view.announced + 1
        topic = self._kafka.topics.control
        await self._transactions.commit([Message(topic, self._encoder.encode(probes), Probes, key=PROBES_KEY)])

    def make_way(self, view: ControlView) -> None:
        """Raises Fatal when another ingest began after this one: while there is nothing to publish, Kafka would not
        tell."""
        if view.announced > self._announced:
            raise Fatal(TOOK_OVER)

    def _new(self, prompts: Sequence[Ready]) -> dict[bytes, Ready]:
        """Those not on the topic, each once, by id."""
        on_topic = self._seen.contains(pack([ready.id for ready in prompts]))
        new: dict[bytes, Ready] = {}
        for ready, seen in zip(prompts, on_topic, strict=True):
            if not seen:
                new.setdefault(ready.id, ready)  # of records that are alike, the first is the one to cite
        return new

    async def _remember(self, found: list[bytes]) -> None:
        # In a thread: every now and then the index grows, and moves millions of ids.
        await asyncio.to_thread(self._seen.add, pack(found))
