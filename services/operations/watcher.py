"""Finds out how far the pipeline is: counts from Kafka, loads and rates from the services, rows from the shards where
they can be read."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from schemas.control import Control, Halt
from schemas.cursors import Cursor
from services.dataset import place
from services.dataset.reader import Shard, View
from services.kernel import topics
from services.kernel.codec import Decoder
from services.kernel.control import ControlView
from services.kernel.errors import Reject, TokenhaulError
from services.kernel.groups import group_offsets, partitions_of
from services.kernel.kafka import Kafka
from services.kernel.watermark import Tracker
from services.operations import letters
from services.operations.letters import Letter
from services.operations.scrape import Scraped, scrape
from services.operations.status import Engine, Partition, Source, Status

SAMPLE_SECONDS = 2.0
"""What a rate is measured over, where only one look is asked for."""


class Watcher:
    """Looks at one dataset again and again. `metrics` are the services' host:port, `root` a place of shards or ""."""

    def __init__(self, kafka: Kafka, metrics: Sequence[str], root: str) -> None:
        self._kafka, self._metrics, self._root = kafka, metrics, root
        self._shards: dict[Shard, tuple[Mapping[str, int], int]] = {}  # shards never change: each is looked at once
        self._letters: tuple[list[dict[int, int]], dict[bytes, Letter]] | None = None
        self._last: tuple[float, int, Scraped] | None = None

    async def look(self) -> Status:
        """The status now; rates are those since the look before, if there was one."""
        kafka = self._kafka
        dataset = await topics.check(kafka)
        scraped, sources, dead, halt, partitions = await asyncio.gather(
            scrape(self._metrics), self._sources(), self._dead(), self._halt(), self._partitions()
        )
        ends, offsets = partitions
        status = Status(
            at=time.time(),
            dataset=dataset.name,
            model=dataset.model,
            halted=halt.reason if halt.halted else None,
            sources=sources,
            engines=_engines(scraped),
            partitions=offsets,
            dead=dict(Counter(letter.reason for letter in dead.values())),
            waiting_prompts=sum(each.prompts for each in offsets.values()),
            waiting_outcomes=sum(each.outcomes for each in offsets.values()),
            unreachable=scraped.unreachable,
        )
        for letter in dead.values():
            if letter.source is not None:
                source = sources.setdefault(letter.source, Source())
                source.dead += 1
                source.failed += letter.stage != "ingest"
        await self._count_done(status, scraped)
        self._rates(status, ends, scraped)
        return status

    async def _dead(self) -> dict[bytes, Letter]:
        """The letters nobody has settled. The topic can be long: it is read again only when something was added."""
        kafka, names = self._kafka, self._kafka.topics
        async with (
            kafka.started(kafka.admin) as admin,
            kafka.started(lambda: kafka.consumer(None, "read_committed")) as reader,
        ):
            ends = [(await _ends(admin, reader, topic))[1] for topic in (names.dead, names.control)]
        if self._letters is None or self._letters[0] != ends:
            self._letters = ends, await letters.read(kafka)
        return self._letters[1]

    async def _sources(self) -> dict[str, Source]:
        decoder = Decoder(Cursor)
        cursors: dict[bytes, Cursor] = {}
        async for record in self._kafka.read_all(self._kafka.topics.cursors):
            try:
                cursors[record.key] = decoder.decode(record.value)
            except Reject:
                continue  # of a newer version of ingest
        sources: defaultdict[str, Source] = defaultdict(Source)
        for cursor in cursors.values():
            sources[cursor.source].published += cursor.published
            sources[cursor.source].refused += sum(cursor.refused.values())
        return dict(sources)

    async def _halt(self) -> Halt:
        view = ControlView()
        decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
        async for record in self._kafka.read_all(self._kafka.topics.control):
            try:
                view.update(record.key, decoder.decode(record.value))
            except Reject:
                continue
        return view.halt

    async def _partitions(self) -> tuple[int, dict[int, Partition]]:
        """How many outcomes there are, and how each partition stands."""
        kafka, names = self._kafka, self._kafka.topics
        async with (
            kafka.started(kafka.admin) as admin,
            kafka.started(lambda: kafka.consumer(None, "read_committed")) as reader,
        ):
            prompts, prompt_ends = await _ends(admin, reader, names.prompts)
            outcomes, outcome_ends = await _ends(admin, reader, names.sequences)
            generated = await group_offsets(admin, names.generator_group, prompts)
            written = await group_offsets(admin, names.sink_group, outcomes)
            begins = await reader.beginning_offsets(prompts)
        found = {}
        for tp in prompts:
            number = tp.partition
            tail = written.get(number, (0, ""))[0]
            found[number] = Partition(
                prompts=_waiting(generated.get(number, (begins[tp], "")), prompt_ends[number]),
                outcomes=outcome_ends[number] - tail,
                tail=tail,
            )
        return sum(outcome_ends.values()), found

    async def _count_done(self, status: Status, scraped: Scraped) -> None:
        """From the shards if they can be read here, else from what the sinks say."""
        done: Mapping[str, float] = scraped.by("tokenhaul_source_outcomes", "source")
        if self._root:
            try:
                done, status.rows, status.discarded = await asyncio.to_thread(self._read_shards)
            except TokenhaulError as error:  # when the store is away, all else is what one wants to see
                status.shards_unread = str(error)
        if not done and status.rows is None:
            return
        for name, source in status.sources.items():
            source.done = int(done.get(name, 0))
            source.share = min(1.0, source.done / source.published) if source.published else None

    def _read_shards(self) -> tuple[Counter[str], int, int]:
        """Records with an outcome by source, rows, and rows that were discarded, as the footers say."""
        view = View(place.find(self._root))
        for shard, footer in view.footers([shard for shard in view.shards if shard not in self._shards]):
            self._shards[shard] = footer.sources, footer.rows
        done: Counter[str] = Counter()
        for sources, _ in self._shards.values():
            done.update(sources)
        return done, sum(rows for _, rows in self._shards.values()), len(view.exclusions.ids)

    def _rates(self, status: Status, outcomes: int, scraped: Scraped) -> None:
        last, self._last = self._last, (status.at, outcomes, scraped)
        if last is None:
            return
        seconds, before = max(0.001, status.at - last[0]), last[2]
        status.outcomes_per_second = max(0, outcomes - last[1]) / seconds
        if status.outcomes_per_second:
            status.seconds_left = status.waiting_prompts / status.outcomes_per_second
        tokens = _growth(before, scraped, "tokenhaul_output_tokens_total", "source")
        status.output_tokens_per_second = sum(tokens.values()) / seconds if tokens else None
        for name, grown in _growth(before, scraped, "tokenhaul_outcomes_total", "source").items():
            if source := status.sources.get(name):
                source.per_second = grown / seconds
                if source.done is not None and grown > 0:
                    source.seconds_left = max(0, source.published - source.done) / source.per_second
        for name, grown in _growth(before, scraped, "tokenhaul_engine_requests_total", "engine").items():
            if engine := status.engines.get(name):
                engine.requests_per_second = grown / seconds
        for name, grown in _growth(before, scraped, "tokenhaul_engine_output_tokens_total", "engine").items():
            if engine := status.engines.get(name):
                engine.tokens_per_second = grown / seconds


async def _ends(
    admin: AIOKafkaAdminClient, reader: AIOKafkaConsumer, topic: str
) -> tuple[list[TopicPartition], dict[int, int]]:
    partitions = await partitions_of(admin, topic)
    return partitions, {tp.partition: end for tp, end in (await reader.end_offsets(partitions)).items()}


def _waiting(committed: tuple[int, str], end: int) -> int:
    """Offsets that are not done, transaction markers among them: a few for each batch."""
    try:
        tracker = Tracker.restore(*committed)
    except ValueError:  # of a newer version
        return end - committed[0]
    return max(0, end - tracker.high) + tracker.outstanding


def _engines(scraped: Scraped) -> dict[str, Engine]:
    def seen(name: str) -> dict[str, float]:
        return scraped.highest(f"tokenhaul_{name}", "engine")

    ours = scraped.by("tokenhaul_engine_in_flight", "engine")
    allowed = scraped.by("tokenhaul_admission_window", "engine")
    running, waiting, use = seen("engine_running"), seen("engine_waiting"), seen("engine_token_usage_ratio")
    return {
        name: Engine(
            ready=bool(ready),
            in_flight=int(ours.get(name, 0)),
            window=int(allowed.get(name, 0)),
            running=int(running.get(name, 0)),
            waiting=int(waiting.get(name, 0)),
            kv_use=use.get(name, 0.0),
        )
        for name, ready in sorted(seen("engine_ready").items())
    }


def _growth(before: Scraped, now: Scraped, name: str, label: str) -> dict[str, float]:
    """How much a counter grew; a process that was started again counts from 0."""
    then = before.by(name, label)
    return {key: max(0.0, value - then.get(key, 0.0)) for key, value in now.by(name, label).items()}
