"""The open shards of this member of the group: records go in, shards come out, partitions come and go.

The loop and aiokafka's rebalance hook both commit; one lock lets them take turns. What blocks (reading records,
building and writing shards, loading chains) runs in threads, because Kafka's heartbeats live on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from schemas.control import Dataset
from services.kernel.errors import Fatal, Retry
from services.kernel.partitions import Member
from services.kernel.retry import Backoff
from services.kernel.store import Store
from services.sink.arrivals import Reader
from services.sink.buffer import Buffer
from services.sink.chain import Chain
from services.sink.deadletters import DeadLetters
from services.sink.metrics import SinkMetrics
from services.sink.partition import Partition
from services.sink.rotation import Rotation
from services.sink.settings import SinkSettings

log = logging.getLogger("tokenhaul.sink")

_LOADING_THREADS = 2  # of the few there are: reading and committing must not queue behind long chains


class Writer:
    """Implements services.kernel.partitions.Handler."""

    def __init__(
        self,
        settings: SinkSettings,
        dataset: Dataset,
        store: Store,
        topic: str,
        consumer: AIOKafkaConsumer,
        letters: DeadLetters,
        metrics: SinkMetrics,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.member: Member[Partition] = Member(consumer, topic, self, fail)
        self._settings, self._dataset, self._store = settings, dataset, store
        self._topic, self._consumer = topic, consumer
        self._letters, self._metrics = letters, metrics
        self._reader = Reader(dataset)
        self._rotation = Rotation(settings)
        self._turn = asyncio.Lock()
        self._loading = asyncio.Semaphore(_LOADING_THREADS)
        self._id = uuid.uuid4().hex

    @property
    def room(self) -> int:
        """How many records may come in."""
        return self._rotation.room(self._buffers())

    async def take(self, records: Sequence[ConsumerRecord]) -> None:
        """Take in what a poll returned; to be called before anything else is awaited."""
        owned = self.member.states
        if not records:
            return
        async with self._turn:
            for partition, arrivals in (await asyncio.to_thread(self._reader.read, records)).items():
                # After a rebalance in between, these records are delivered again to whoever has the partition now.
                if self.member.states.get(partition) is owned[partition]:
                    owned[partition].take(arrivals, time.monotonic())
                    self._rotation.arrived(arrivals)
                    self._metrics.records_in.inc(len(arrivals))

    async def rotate(self) -> None:
        """Commit the shards that are due, and tell Kafka where the chains end."""
        async with self._turn:
            for partition in self._rotation.due(self._buffers(), time.monotonic()):
                await self._commit(partition)
            await self._hint()

    async def flush(self) -> None:
        """Commit all open shards, as far as that works now."""
        async with self._turn:
            for partition, buffer in self._buffers().items():
                if buffer.end > buffer.start:
                    await self._commit(partition)
            await self._hint()

    async def caught_up(self) -> bool:
        """Whether the chains reach the ends of the assigned partitions, read now. Flushes when only that is missing."""
        states = self.member.states
        try:
            ends = {partition: end for partition, (_, end) in (await self._log_ranges(list(states))).items()}
        except Retry as retry:
            log.warning("not known how far there is to go: %s", retry, extra={"action": "idle"})
            return False
        if any(state.buffer.end < ends[partition] for partition, state in states.items()):
            return False
        await self.flush()
        return self.member.loaded and all(
            self.member.states.get(partition) is state and state.chain.tail >= ends[partition]
            for partition, state in states.items()
        )

    async def load(self, partition: int, state: Partition | None) -> tuple[Partition, int]:
        """The chain as it is in the store; an open shard of ours is kept if nobody wrote meanwhile."""
        backoff = Backoff(base=0.5, cap=15.0)
        while True:
            try:
                loaded = await self._load(partition, state)
                return loaded, loaded.read_from
            except Retry as retry:
                self._metrics.retried(retry.cause)
                log.warning("not loaded: %s", retry, extra=self._place("load", partition))
                await asyncio.sleep(backoff.next())

    async def before_rebalance(self) -> None:
        """Commit what is open: whoever has the partition next need not read it again."""
        self._metrics.rebalances.inc()
        await self.flush()

    def lost(self, partition: int, state: Partition) -> None:
        """What was open is read again by the new owner. Nothing to undo: only the chain counts."""

    def report(self) -> None:
        """Bring the gauges up to date."""
        states = self.member.states
        ends = {
            partition: max(self.member.log_end(partition) or 0, state.buffer.end) for partition, state in states.items()
        }
        self._metrics.standing(self._topic, states, ends)

    def _place(self, action: str, partition: int, buffer: Buffer | None = None) -> dict[str, object]:
        """What a line of the log is about: offsets [offset, end) of a partition."""
        place: dict[str, object] = {"action": action, "topic": self._topic, "partition": partition}
        return place if buffer is None else place | {"offset": buffer.start, "end": buffer.end}

    def _buffers(self) -> dict[int, Buffer]:
        return {partition: state.buffer for partition, state in self.member.states.items()}

    async def _commit(self, partition: int) -> None:
        """The dead letters of a shard are acknowledged before it is committed: after it, nobody would send them."""
        state = self.member.states.get(partition)
        began = time.monotonic()
        if state is None or state.not_before > began:
            return
        buffer = state.buffer
        try:
            await self._letters.publish(buffer.letters)
            size = await asyncio.to_thread(state.commit)
        except Retry as retry:
            self._metrics.retried(retry.cause)
            log.warning("shard not committed: %s", retry, extra=self._place("commit", partition, buffer))
            state.postpone(time.monotonic())
            return
        span = self._place("commit", partition, buffer)
        if size is not None:
            self._metrics.committed(buffer, size, time.monotonic() - began)
            log.info("shard of %d rows, %d bytes", len(buffer.rows), size, extra=span)
            return
        self._metrics.conflicts.inc()
        log.warning("another writer committed this part: reading its shards", extra=span)
        if self.member.states.get(partition) is state:
            await self.member.reload(partition)

    async def _hint(self) -> None:
        """Kafka's committed offset serves lag and nothing else; after a crash it may be behind the chain."""
        behind = {p: state for p, state in self.member.states.items() if state.hinted != state.chain.tail}
        tails = {partition: state.chain.tail for partition, state in behind.items()}
        if not behind:
            return
        if not await self.member.commit({partition: (tail, "") for partition, tail in tails.items()}):
            self._metrics.commit_failures.inc()
        else:
            for partition, state in behind.items():
                state.hinted = tails[partition]

    async def _load(self, partition: int, state: Partition | None) -> Partition:
        if partition >= self._dataset.partitions:
            raise Fatal(
                f"{self._topic} has a partition {partition}, dataset {self._dataset.name!r} has "
                f"{self._dataset.partitions}: partitions were added, and copies of a record would not meet any more"
            )
        chain = state.chain if state else Chain(self._store, self._dataset, partition, self._id)
        async with self._loading:
            await asyncio.to_thread(chain.refresh)
        if state is None:
            await self._look_for_lost_shards(partition, chain.tail)
        log_start, log_end = (await self._log_ranges([partition]))[partition]
        kept = state is not None and state.buffer.start == chain.tail
        buffer = state.buffer if state and kept else Buffer(chain.tail, chain.last_id)
        place = f"{self._topic}/{partition}"
        if buffer.end > log_end:
            raise Fatal(
                f"the chain of {place} ends at {buffer.end}, the topic at {log_end}: the topic was made anew or is "
                "another one. Take a new dataset"
            )
        if buffer.end < log_start:
            missing = log_start - buffer.end
            self._metrics.gap_records.inc(missing)
            message = (
                f"{missing} records of {place} were deleted before they were committed: [{buffer.end}, {log_start})"
            )
            if self._settings.on_gap == "stop":
                raise Fatal(f"{message}. TOKENHAUL_SINK_ON_GAP=continue goes on without them")
            log.error(message, extra=self._place("gap", partition, buffer))
            buffer.skip(log_start, time.monotonic())
        return Partition(chain, buffer, log_start)

    async def _look_for_lost_shards(self, partition: int, tail: int) -> None:
        """Kafka is told of no offset that no shard has reached. Going on is safe, but somebody should know."""
        try:
            hint = await self._consumer.committed(TopicPartition(self._topic, partition))
        except KafkaError as error:
            raise Retry("kafka", f"{self._topic}: {error!r}") from error
        if hint is not None and hint > tail:
            log.error(
                "%s/%d was in shards up to offset %d, the chain ends at %d: was TOKENHAUL_SINK_ROOT changed, or were "
                "shards deleted? What the topic still has is written again",
                self._topic, partition, hint, tail, extra={"action": "load"},
            )  # fmt: skip

    async def _log_ranges(self, partitions: list[int]) -> dict[int, tuple[int, int]]:
        """Where the topic's partitions begin and end. Raises Retry. Each request waits behind a fetch."""
        tps = [TopicPartition(self._topic, partition) for partition in partitions]
        try:
            begins, ends = await self._consumer.beginning_offsets(tps), await self._consumer.end_offsets(tps)
        except KafkaError as error:
            raise Retry("kafka", f"{self._topic}: {error!r}") from error
        return {tp.partition: (begins[tp], ends[tp]) for tp in tps}
