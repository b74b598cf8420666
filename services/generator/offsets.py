"""How far each partition is done: taken up from what was committed, committed again as work finishes.

Also the two cases in which going on would cost money or lose prompts, and so ends the generator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from services.generator.metrics import GeneratorMetrics
from services.kernel.errors import Fatal
from services.kernel.groups import caught_up, group_offsets
from services.kernel.kafka import Topics
from services.kernel.partitions import Member
from services.kernel.watermark import Tracker

log = logging.getLogger("tokenhaul.generator")

_RETRY_SECONDS = 0.5


class Offsets:
    """The trackers of this member's partitions of the prompts topic (a Handler of its Member)."""

    def __init__(
        self,
        topics: Topics,
        consumer: AIOKafkaConsumer,
        admin: AIOKafkaAdminClient,
        fail: Callable[[BaseException], None],
        cancel: Callable[[int, Callable[[int], bool]], None],
        session_seconds: float,
        metrics: GeneratorMetrics,
        *,
        from_start: bool,
    ) -> None:
        self.member: Member[Tracker] = Member(consumer, topics.prompts, self, fail)
        self._topics, self._consumer, self._admin = topics, consumer, admin
        self._cancel, self._metrics, self._from_start = cancel, metrics, from_start
        self._session_seconds = session_seconds
        self._committed: dict[int, tuple[int, str]] = {}
        self.ours_until = 0.0
        """Until then (time.monotonic) nobody else has our partitions: Kafka has just heard of us. A process that was
        frozen, or cut off, must not begin what another member may have done meanwhile."""

    async def note_positions(self) -> None:
        """After a poll whose records were all taken in: markers behind them are passed too."""
        for partition, tracker in self.member.states.items():
            position = await self.member.position(partition)
            if position is not None:
                tracker.passed(position)

    async def commit(self) -> None:
        """Commit every watermark that moved, with what is done beyond it. Accepted, it proves that all are ours."""
        trackers = self.member.states
        state = {partition: (tracker.watermark, tracker.metadata()) for partition, tracker in trackers.items()}
        now = time.monotonic()
        if self.ours_until - now < self._session_seconds / 2:
            moved = state  # nothing may have moved for long: asked for the sake of the answer
        else:
            moved = {partition: value for partition, value in state.items() if self._committed.get(partition) != value}
        if moved and await self.member.commit(moved):
            self._committed |= moved
            self.ours_until = now + self._session_seconds
        elif moved:
            self._metrics.commit_failures.inc()
        for partition, (watermark, _) in state.items():
            end = self.member.log_end(partition)
            if end is not None:
                self._metrics.lag(self._topics.prompts, partition, max(0, end - watermark))

    async def all_done(self) -> bool:
        """Whether the whole group has committed the end of every partition, as far as Kafka tells now."""
        try:
            return await caught_up(self._admin, self._consumer, self._topics.generator_group, self._topics.prompts)
        except KafkaError as error:
            log.warning("not known whether all is done: %r", error, extra={"action": "idle"})
            return False

    async def load(self, partition: int, state: Tracker | None) -> tuple[Tracker, int]:
        """What was committed last, merged with what this member still knows."""
        self._committed.pop(partition, None)
        asked = time.monotonic()
        restored = await self._restore(partition)
        if state is None:
            state = restored
        else:
            state.merge(restored)
            self._cancel(partition, state.is_open)
        self.ours_until = max(self.ours_until, asked + self._session_seconds)
        return state, state.watermark

    async def before_rebalance(self) -> None:
        """Commit what is done, so that nobody does it again."""
        self._metrics.rebalances.inc()
        await self.commit()

    def lost(self, partition: int, state: Tracker) -> None:
        """Somebody else has the partition."""
        self._metrics.forget_lag(self._topics.prompts, partition)
        self._cancel(partition, lambda _: False)

    async def _restore(self, partition: int) -> Tracker:
        prompts = TopicPartition(self._topics.prompts, partition)
        log_start = int((await self._consumer.beginning_offsets([prompts]))[prompts])
        committed = (await group_offsets(self._admin, self._topics.generator_group, [prompts])).get(partition)
        if committed is None:
            await self._refuse_second_payment(partition)
            # Committed before any work: whoever finds no offset later knows that nothing was ever begun.
            while not await self.member.commit({partition: (log_start, "")}):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(_RETRY_SECONDS)
            return Tracker(log_start)
        try:
            tracker = Tracker.restore(*committed)
        except ValueError as error:
            raise Fatal(f"offset of {self._topics.generator_group} on {prompts.topic}/{partition}: {error}") from error
        if log_start > tracker.watermark:
            raise Fatal(
                f"{prompts.topic}/{partition} begins at {log_start}, but all is done only below {tracker.watermark}: "
                f"prompts in between were deleted from Kafka and would be lost in silence"
            )
        return tracker

    async def _refuse_second_payment(self, partition: int) -> None:
        outcomes = TopicPartition(self._topics.sequences, partition)
        if (await self._consumer.end_offsets([outcomes]))[outcomes] > 0 and not self._from_start:
            raise Fatal(
                f"group {self._topics.generator_group} has no offset for partition {partition}, but "
                f"{self._topics.sequences} holds outcomes of it: its offsets were lost (Kafka forgets those of a group "
                f"away for a week), and all prompts would be paid for again. Set them with kafka-consumer-groups, or "
                f"set TOKENHAUL_GENERATOR_FROM_START=true"
            )
