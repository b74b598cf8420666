"""A member of a consumer group whose partitions each carry a state that must be loaded before records are taken.

What aiokafka 0.14 does, and what is done about it here:
- it swallows exceptions of rebalance listeners: they are handed to `fail`, which ends the service;
- it sends no heartbeat before the assigned hook returns: the hook only starts the loading and returns;
- a partition that stays with its member is rewound to the committed offset: every assigned partition is loaded again
  (with the state it has), and the consumer is put where the state says;
- pausing throws fetched records away: partitions that must wait are left out of the poll instead;
- of a code it does not know it makes an error without a name, and joins again as the member it was. A member with an
  instance id seems to get one (FENCED_INSTANCE_ID) when what its killed predecessor had sent to a slow broker is read
  after its own: it must join as a new one;
- it leaves the group when nobody polls for `max_poll_interval`: a full service polls for nothing, but polls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from services.kernel import failpoints
from services.kernel.errors import Fatal
from services.kernel.kafka import may_pass
from services.kernel.retry import Backoff

log = logging.getLogger("tokenhaul.partitions")

S = TypeVar("S")
_NOTHING = TopicPartition("", 0)
_POLL_MS = 200
_POLL_SECONDS = 5.0
_COMMIT_SECONDS = 10.0
_HOOK_SECONDS = 30.0
_REFUSED_SECONDS = 120.0


class Handler(Protocol[S]):
    """What a service does about its partitions."""

    async def load(self, partition: int, state: S | None) -> tuple[S, int]:
        """The state of an assigned partition (`state`: what this member still holds of it) and where to read on."""

    async def before_rebalance(self) -> None:
        """Partitions may go to somebody else: make durable what can be, within seconds."""

    def lost(self, partition: int, state: S) -> None:
        """The partition is not ours any more: drop its work."""


class Member(Generic[S]):
    """Owns the consumer. One task polls; the hooks run in aiokafka's."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        topic: str,
        handler: Handler[S],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._consumer, self._topic, self._handler, self._fail = consumer, topic, handler, fail
        self._states: dict[int, S] = {}
        self._ready: set[int] = set()
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._committing = asyncio.Lock()
        self._joined = self._closed = False
        self._refused_since: float | None = None
        self._backoff = Backoff(base=0.2, cap=5.0)

    def subscribe(self) -> None:
        """Join the group."""
        self._consumer.subscribe([self._topic], listener=_Listener(self._revoked, self._assigned))

    @property
    def states(self) -> Mapping[int, S]:
        """The state of every partition that is ready."""
        return {partition: self._states[partition] for partition in sorted(self._ready)}

    @property
    def loaded(self) -> bool:
        """In the group, and all its partitions are ready (it has none where there are more members than partitions)."""
        return self._joined and not self._loading

    async def poll(self, room: int, partitions: list[int]) -> list[ConsumerRecord]:
        """Up to `room` records of those `partitions` that are ready, in order of offset within each. Waits a moment."""
        wanted = [TopicPartition(self._topic, p) for p in partitions if p in self._ready] if room > 0 else []
        try:
            batches = await self._consumer.getmany(
                *(wanted or [_NOTHING]), timeout_ms=_POLL_MS, max_records=max(room, 1)
            )
        except KafkaError as error:
            if not may_pass(error):
                raise
            await self._join_anew(error)
            return []
        return [record for tp, batch in batches.items() if tp.partition in self._ready for record in batch]

    async def _join_anew(self, error: KafkaError) -> None:
        """As one the group does not know, after a while. Raises Fatal when that has not helped for long."""
        now = time.monotonic()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since > _REFUSED_SECONDS:
            raise Fatal(
                f"the group of {self._topic} has refused this member for {_REFUSED_SECONDS:.0f} s, last with {error!r}"
            ) from error
        log.warning("the group refuses this member, joining anew: %r", error, extra={"action": "rebalance"})
        self._consumer._coordinator.reset_generation()
        await asyncio.sleep(self._backoff.next())

    async def position(self, partition: int) -> int | None:
        """The offset of the next record that `poll` would give, beyond any transaction markers. None: not ready."""
        if partition not in self._ready:
            return None
        try:
            return int(await self._consumer.position(TopicPartition(self._topic, partition)))
        except IllegalStateError:
            return None

    def log_end(self, partition: int) -> int | None:
        """The end of the partition as of the last fetch (the last stable offset for a read_committed consumer)."""
        tp = TopicPartition(self._topic, partition)
        return self._consumer.last_stable_offset(tp) if partition in self._ready else None

    def seek(self, partition: int, offset: int) -> None:
        """Read on from `offset`."""
        self._consumer.seek(TopicPartition(self._topic, partition), offset)

    async def reload(self, partition: int) -> None:
        """Load the state anew, with nothing kept of what is there."""
        state = self._states.pop(partition, None)
        self._ready.discard(partition)
        if state is not None:
            self._handler.lost(partition, state)
        self._start_loading(partition)

    async def commit(self, offsets: Mapping[int, tuple[int, str]]) -> bool:
        """Commit {partition: (offset, metadata)}. False: not now, or not ours any more, which ends nothing."""
        async with self._committing:
            try:
                failpoints.passing("commit.before")
                async with asyncio.timeout(_COMMIT_SECONDS):  # a lost coordinator is looked for without end
                    await self._consumer.commit(
                        {TopicPartition(self._topic, p): OffsetAndMetadata(*value) for p, value in offsets.items()}
                    )
                failpoints.passing("commit.after")
            except TimeoutError:
                log.warning("commit not answered within %.0f s", _COMMIT_SECONDS, extra={"action": "commit"})
                return False
            except (CommitFailedError, IllegalStateError) as error:
                log.info("commit refused, partitions are being moved: %r", error, extra={"action": "commit"})
                return False
            except KafkaError as error:
                if not may_pass(error):
                    raise
                log.warning("commit failed, trying again: %r", error, extra={"action": "commit"})
                return False
        return True

    async def close(self) -> None:
        """Stop what is still loading. The consumer is closed by whoever made it, and may be assigned partitions yet."""
        self._closed = True
        await self._stop_loading()

    async def _revoked(self) -> None:
        self._joined = False
        try:
            await self._stop_loading()
            if not self._closed:
                async with asyncio.timeout(_HOOK_SECONDS):
                    await self._handler.before_rebalance()
        except TimeoutError:
            log.warning("rebalance goes on without a last commit", extra={"action": "rebalance"})
        except Exception as error:
            self._fail(error)
        self._ready.clear()
        await self._stop_loading()  # what was reloaded meanwhile: it must not seek in a partition of somebody else

    async def _assigned(self, partitions: set[int]) -> None:
        try:
            self._refused_since = None
            self._backoff.reset()
            log.info("assigned %s", sorted(partitions), extra={"action": "rebalance", "topic": self._topic})
            for partition in sorted(self._states.keys() - partitions):
                self._handler.lost(partition, self._states.pop(partition))
            for partition in sorted(partitions):
                self._start_loading(partition)
            self._joined = True
        except Exception as error:
            self._fail(error)

    def _start_loading(self, partition: int) -> None:
        if self._closed:  # it would outlive the clients it asks
            return
        self._loading[partition] = asyncio.create_task(self._load(partition))

    async def _load(self, partition: int) -> None:
        backoff = Backoff(base=0.5, cap=15.0)
        try:
            while True:
                try:
                    state, offset = await self._handler.load(partition, self._states.get(partition))
                    break
                except KafkaError as error:
                    if not may_pass(error):
                        raise
                    log.warning("partition %d not loaded, trying again: %r", partition, error, extra={"action": "load"})
                    await asyncio.sleep(backoff.next())
            self._states[partition] = state
            self.seek(partition, offset)
            self._ready.add(partition)
        except Exception as error:
            self._fail(error)
        finally:
            if self._loading.get(partition) is asyncio.current_task():
                del self._loading[partition]

    async def _stop_loading(self) -> None:
        loading, self._loading = list(self._loading.values()), {}
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, revoked: Callable[[], object], assigned: Callable[[set[int]], object]) -> None:
        self._on_revoked, self._on_assigned = revoked, assigned

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> object:
        return self._on_revoked()

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> object:
        return self._on_assigned({tp.partition for tp in assigned})
