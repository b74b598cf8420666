"""Generators that come, go, die and freeze: nothing is lost, and every generation beyond the first is accounted for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from schemas.prompts import Prompt
from services.generator.service import Generator
from services.kernel.kafka import Kafka
from services.local.kafka import free_ports
from tests.integration.test_generator import asked, committed, make_generator
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel
from tests.support.processes import kill, tokenhaul
from tests.support.stream import create_topics, eventually, make_prompt, publish, read_outcomes, running

pytestmark = pytest.mark.long

WINDOW = 8
LATENCY = 0.1
A_SECOND = WINDOW / LATENCY
"""Generations a member finishes in the second between two commits."""


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FakeModel(FACTS, latency=lambda _: LATENCY)) as engine:
        yield engine


def one_generator(kafka: Kafka, engine: FakeEngine) -> Generator:
    return make_generator(kafka, engine, window=str(WINDOW))


async def all_answered(kafka: Kafka, prompts: list[Prompt]) -> bool:
    return {outcome.record_id for outcome in await read_outcomes(kafka)} == {prompt.id for prompt in prompts}


def repeated(engine: FakeEngine) -> int:
    """Generations beyond the first of each prompt."""
    return sum(count - 1 for count in asked(engine).values())


async def test_a_storm_of_joins_and_leaves(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(800)]
    await publish(kafka, prompts, batch=50)
    rounds = 4
    async with running(one_generator(kafka, engine)):
        for _ in range(rounds):
            before = len(engine.ended)
            async with running(one_generator(kafka, engine)) as (joined, task):
                await eventually(lambda joined=joined: not joined.health.not_ready)
                await eventually(lambda before=before: len(engine.ended) > before + 20)
                joined.stopping.set()
                await asyncio.wait_for(task, 60)
        await eventually(lambda: all_answered(kafka, prompts), 90)
    # A partition that moves takes its in-flight work from a member that goes on; who leaves finishes what it has begun.
    bound = 2 * rounds * WINDOW
    print(f"{repeated(engine)} generations twice in {2 * rounds} rebalances, at most {bound} are accounted for")
    assert repeated(engine) <= bound


async def test_a_member_that_froze_and_came_back_repeats_nothing_that_is_done(kafka: Kafka, engine: FakeEngine) -> None:
    """A -> B -> A: A is suspended until its partitions are B's, wakes up with stale work, and gets them back."""
    await create_topics(kafka)
    first, second, third = ([make_prompt(number) for number in range(start, start + 150)] for start in (0, 150, 300))
    a, b = start_process(kafka, engine), None
    await publish(kafka, first)
    await eventually(lambda: len(engine.ended) > 60, 60)
    os.kill(a.pid, signal.SIGSTOP)
    frozen_at = Counter(asked(engine))
    in_flight = len(engine.started) - len(engine.ended)

    b = start_process(kafka, engine)
    await publish(kafka, second)
    await eventually(lambda: all_answered(kafka, first + second), 90)
    of_b = asked(engine) - frozen_at
    assert sum((frozen_at & of_b).values()) <= in_flight + WINDOW + A_SECOND, "B may repeat what A had not committed"

    os.kill(a.pid, signal.SIGCONT)
    await eventually(lambda: both_are_members(kafka), 60)
    kill(b.pid)
    before_third = asked(engine)
    await publish(kafka, third)
    await eventually(lambda: all_answered(kafka, first + second + third), 90)
    await eventually(lambda: all_committed(kafka), 30)
    again = asked(engine) - before_third
    done_before = {tuple(prompt.prompt_ids) for prompt in first + second}
    assert not [prompt for prompt in again if prompt in done_before], "A did again what was done and committed"
    a.terminate()
    output, _ = await asyncio.to_thread(a.communicate, timeout=60)
    assert a.returncode == 0, output


def start_process(kafka: Kafka, engine: FakeEngine) -> subprocess.Popen[str]:
    return tokenhaul(
        "generate",
        TOKENHAUL_KAFKA_BOOTSTRAP=kafka.address,
        TOKENHAUL_KAFKA_PREFIX=kafka.settings.prefix,
        TOKENHAUL_KAFKA_SESSION_TIMEOUT_SECONDS="6",
        TOKENHAUL_GENERATOR_ENGINES=engine.url,
        TOKENHAUL_GENERATOR_WINDOW=str(WINDOW),
        TOKENHAUL_METRICS_PORT=str(free_ports(1)[0]),
        TOKENHAUL_LOG_LEVEL="warning",
    )


async def both_are_members(kafka: Kafka) -> bool:
    async with kafka.started(kafka.admin) as admin:
        (answer,) = await admin.describe_consumer_groups([kafka.topics.generator_group])
    ((_, _, state, _, _, members, *_),) = answer.groups
    return state == "Stable" and len(members) == 2


async def all_committed(kafka: Kafka) -> bool:
    return all(not metadata for _, metadata in (await committed(kafka)).values())
