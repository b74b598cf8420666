"""What a generator tells the others of what it has made, and when the group has made enough."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.control import HALT_KEY, Control, Halt
from services.generator import service
from services.generator.budget import Budget
from services.generator.in_flight import InFlight
from services.generator.settings import GeneratorSettings
from services.kernel.codec import Decoder
from services.kernel.control import ControlView
from tests.support.outcomes import make_sequence


class Topic:
    """A control topic that everybody reads at once."""

    def __init__(self) -> None:
        self.view = ControlView()
        self.written: list[Control] = []

    async def publish(self, topic: str, value: bytes, *, headers: object, key: bytes) -> None:
        message: Control = Decoder(Control).decode(value)  # type: ignore[arg-type]
        self.written.append(message)
        self.view.update(key, message)

    def budget(self, instance: str, **limits: Any) -> Budget:
        settings = GeneratorSettings(engines=["http://a"], **limits)
        return Budget(settings, self.view, self, "control", instance)  # type: ignore[arg-type]


@pytest.fixture
def topic() -> Topic:
    return Topic()


async def test_a_budget_is_of_the_group_and_survives_a_restart(topic: Topic) -> None:
    first, second = topic.budget("a", max_rows=3), topic.budget("b", max_rows=3)
    first.add(make_sequence(1))
    second.add(make_sequence(2))
    for budget in (first, second):
        await budget.begin()
        await budget.tick(1)
    assert not first.halted
    restarted = topic.budget("a", max_rows=3)
    restarted.add(make_sequence(3))
    await restarted.tick(1)
    assert topic.view.halt.reason == "max_rows 3 reached: 3"
    assert second.halted
    assert topic.budget("c", max_rows=3).halted


async def test_it_has_stopped_when_the_loop_obeys_and_nothing_is_in_flight(topic: Topic) -> None:
    budget = topic.budget("a", max_output_tokens=1)
    await budget.begin()
    assert not budget.closed()
    budget.add(make_sequence(1))
    await budget.tick(1)
    assert (budget.halted, budget.stopped, topic.view.stopped) == (True, False, False)
    await budget.tick(0)
    assert not budget.stopped, "a poll that began before the halt may bring prompts yet"
    assert budget.closed()
    await budget.tick(2)
    assert not topic.view.stopped
    await budget.tick(0)
    assert (budget.stopped, topic.view.stopped) == (True, True)


async def test_a_new_epoch_begins_anew(topic: Topic) -> None:
    budget = topic.budget("a", max_rows=1)
    budget.add(make_sequence(1))
    await budget.tick(0)
    topic.view.update(HALT_KEY, Halt(halted=False, epoch=1, created_at=0.0))
    await budget.tick(0)
    assert not budget.halted
    assert [spent.rows for spent in topic.view.spent()] == [0]


async def test_hours_count_from_whoever_began_first(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("services.generator.budget.time.time", lambda: now)
    first, second = topic.budget("a", max_hours=2), topic.budget("b", max_hours=2)
    await first.begin()
    now = 7199.0
    await second.tick(0)
    assert not second.halted
    now = 7200.0
    await second.tick(0)
    assert topic.view.halt.reason == "max_hours 2 reached: 2"


async def test_without_a_budget_nothing_is_told(topic: Topic) -> None:
    budget = topic.budget("a")
    await budget.begin()
    await budget.tick(0)
    assert topic.written == []


async def test_a_stop_does_not_wait_for_a_kafka_that_is_away(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def at_once(*_: object) -> None:
        pass

    budget = topic.budget("a", max_rows=3)
    monkeypatch.setattr(topic, "publish", never)
    monkeypatch.setattr(service, "_TELL_SECONDS", 0.01, raising=False)
    parts = SimpleNamespace(
        engines=SimpleNamespace(close=lambda: None), in_flight=InFlight(lambda _: None),
        offsets=SimpleNamespace(commit=at_once), budget=budget,
    )  # fmt: skip
    generator = service.make({"TOKENHAUL_GENERATOR_ENGINES": "http://a", "TOKENHAUL_KAFKA_BOOTSTRAP": "localhost:1"})
    context = SimpleNamespace(process=SimpleNamespace(drain_seconds=0.01))
    async with asyncio.timeout(5):
        await generator._drain(context, parts)  # type: ignore[arg-type]
    assert "not told" in caplog.text
