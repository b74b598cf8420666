"""What a member of a group takes for the end, what for a moment's trouble, and what it does in its own last moments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    InvalidSessionTimeoutError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    OffsetOutOfRangeError,
    UnknownError,
)

from services.kernel import partitions
from services.kernel.errors import Fatal
from services.kernel.kafka import may_pass
from services.kernel.partitions import Member
from services.kernel.retry import Backoff


def wrapped(error: KafkaError) -> KafkaError:
    """As aiokafka's coordinator gives what it does not expect."""
    return KafkaError(repr(error))


PASSING = [
    UnknownError(), wrapped(UnknownError()), KafkaTimeoutError(), KafkaConnectionError(),
    KafkaError("Unexpected exception in heartbeat task: UnknownError()"),
]  # fmt: skip
ENDING = [
    wrapped(InvalidSessionTimeoutError()), GroupAuthorizationFailedError("group"), OffsetOutOfRangeError({}),
    KafkaError("Unexpected error during coordination ValueError()"), KafkaError(),
]  # fmt: skip


class Consumer:
    """Raises what it is given, then has nothing."""

    def __init__(self, *errors: KafkaError) -> None:
        self.errors = list(errors)
        self._coordinator = self
        self.joined_anew = 0

    def reset_generation(self) -> None:
        self.joined_anew += 1

    def subscribe(self, topics: list[str], listener: ConsumerRebalanceListener) -> None:
        self.listener = listener

    async def getmany(self, *_: Any, **__: Any) -> dict[Any, Any]:
        if self.errors:
            raise self.errors.pop(0)
        return {}


@pytest.mark.parametrize("error", PASSING, ids=repr)
async def test_trouble_of_the_coordinator_that_may_pass_is_told_and_polled_over(
    error: KafkaError, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer(error)
    member: Member[None] = Member(consumer, "topic", None, pytest.fail)  # type: ignore[arg-type]
    assert await member.poll(1, []) == []
    assert repr(error) in caplog.text
    assert consumer.joined_anew == 1
    caplog.clear()
    assert await member.poll(1, []) == []
    assert not caplog.text


@pytest.mark.parametrize("error", ENDING, ids=repr)
async def test_what_will_not_pass_is_raised(error: KafkaError) -> None:
    assert not may_pass(error)
    member: Member[None] = Member(Consumer(error), "topic", None, pytest.fail)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        await member.poll(1, [])


async def test_who_is_refused_for_long_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "next", lambda self: 0.0)
    consumer = Consumer(*[wrapped(UnknownError())] * 9)
    member: Member[None] = Member(consumer, "topic", None, pytest.fail)  # type: ignore[arg-type]
    for _ in range(8):
        assert await member.poll(1, []) == []
    monkeypatch.setattr(partitions, "_REFUSED_SECONDS", -1.0)
    with pytest.raises(Fatal, match=r"the group of topic has refused this member for .*UnknownError"):
        await member.poll(1, [])


class Loads:
    """Loads for ever."""

    def __init__(self) -> None:
        self.loading: set[int] = set()

    async def load(self, partition: int, state: None) -> tuple[None, int]:
        self.loading.add(partition)
        try:
            return await asyncio.Event().wait() and None, 0
        finally:
            self.loading.remove(partition)

    async def before_rebalance(self) -> None: ...

    def lost(self, partition: int, state: None) -> None: ...


async def test_what_is_assigned_to_a_member_that_is_closed_is_not_loaded() -> None:
    """The consumer is closed after the member, and a rebalance may end in between."""
    consumer, handler = Consumer(), Loads()
    member: Member[None] = Member(consumer, "topic", handler, pytest.fail)  # type: ignore[arg-type]
    member.subscribe()
    await consumer.listener.on_partitions_assigned({TopicPartition("topic", 0)})
    await asyncio.sleep(0)
    assert handler.loading == {0}
    await member.close()
    await consumer.listener.on_partitions_assigned({TopicPartition("topic", 1)})
    await asyncio.sleep(0)
    assert handler.loading == set()
