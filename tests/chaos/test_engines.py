"""Engines that are dead for long or slow, and clocks that disagree: nothing fails, nothing is paid for twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack

import msgspec
import pytest

from schemas.prompts import Prompt
from schemas.sequences import Sequence
from services.kernel.kafka import Kafka
from tests.integration.test_generator import asked, make_generator
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel
from tests.support.stream import create_topics, eventually, make_prompt, mark_idle, publish, read_outcomes, running

LONG_SECONDS = 65.0
"""Longer than any backoff, health check or session time-out of the generator."""


async def sequences_of(kafka: Kafka, prompts: list[Prompt]) -> None:
    """Fail unless every prompt has one outcome, a sequence."""
    outcomes = await read_outcomes(kafka)
    assert Counter(outcome.record_id for outcome in outcomes) == Counter(prompt.id for prompt in prompts)
    assert all(isinstance(outcome, Sequence) for outcome in outcomes)


def slow_by(seconds: float) -> FakeEngine:
    return FakeEngine(FakeModel(FACTS, latency=lambda _: seconds), slots=8)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_all_engines_dead_for_more_than_a_minute(kafka: Kafka) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(200)]
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(slow_by(0.1)) for _ in range(2)]
        generator = make_generator(kafka, engines[0], engines=",".join(engine.url for engine in engines), window="8")
        _, task = await stack.enter_async_context(running(generator, "run"))
        await eventually(lambda: sum(len(engine.ended) for engine in engines) > 40)
        for engine in engines:
            await engine.die()
        await asyncio.sleep(LONG_SECONDS)  # the length of the fault, not a wait for anything
        assert not task.done()
        for engine in engines:
            await engine.revive()
        await asyncio.wait_for(task, 120)
        started = sum((asked(engine) for engine in engines), Counter[tuple[int, ...]]())
    await sequences_of(kafka, prompts)
    assert started.total() - len(prompts) <= 2 * 8, "more was repeated than was in flight when they died"


async def test_one_slow_engine_of_three_gets_what_it_can_do_and_holds_nobody_up(kafka: Kafka) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(240)]
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    async with AsyncExitStack() as stack:
        slow, *others = [await stack.enter_async_context(slow_by(seconds)) for seconds in (2.0, 0.05, 0.05)]
        urls = ",".join(engine.url for engine in (slow, *others))
        _, task = await stack.enter_async_context(running(make_generator(kafka, slow, engines=urls, window="8"), "run"))
        await asyncio.wait_for(task, 110)
    await sequences_of(kafka, prompts)
    counts = [len(engine.started) for engine in (slow, *others)]
    assert sum(counts) == len(prompts)
    assert counts[0] < min(counts[1:]) / 2, f"the slow one was given as much as the others: {counts}"


@pytest.mark.parametrize("days", [-400, 400])
async def test_the_clock_of_whoever_made_the_prompts_is_wrong(days: int, kafka: Kafka) -> None:
    await create_topics(kafka)
    skewed = time.time() + days * 86_400
    prompts = [msgspec.structs.replace(make_prompt(number), created_at=skewed) for number in range(20)]
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    async with FakeEngine() as engine, running(make_generator(kafka, engine), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    await sequences_of(kafka, prompts)


async def test_the_generator_s_clock_jumps_while_it_works(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(60)]
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    now, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + offset[0])
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(FakeModel(FACTS, latency=lambda _: 0.05), slots=4))
        _, task = await stack.enter_async_context(running(make_generator(kafka, engine, window="4"), "run"))
        for jump in (86_400.0, -86_400.0, 0.0):
            before = len(engine.ended)
            await eventually(lambda before=before: task.done() or len(engine.ended) > before + 5)
            offset[0] = jump
        await asyncio.wait_for(task, 60)
    await sequences_of(kafka, prompts)
