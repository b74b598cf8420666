"""What engines, routers, Kafka and operators do to a generator at their worst moments."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from schemas import ids
from schemas.sequences import Failure, FailureReason, Sequence
from services.generator import outcomes as outcomes_module
from services.generator.service import Generator
from services.kernel.errors import Fatal
from services.kernel.groups import partitions_of
from services.kernel.kafka import Kafka
from services.local.kafka import free_ports
from tests.integration.test_engines import poisons, revived, router
from tests.integration.test_generator import asked, generate_all, make_generator
from tests.support import fake_engine as fake
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel, expected_output
from tests.support.processes import tokenhaul
from tests.support.stream import (
    PARTITIONS,
    create_topics,
    eventually,
    make_prompt,
    mark_idle,
    publish,
    read_outcomes,
    running,
)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


def wasted(generator: Generator, cause: str) -> float | None:
    return generator.metrics.registry.get_sample_value("tokenhaul_wasted_tokens_total", {"cause": cause})


async def test_a_request_that_never_ends_meets_its_deadline(kafka: Kafka, engine: FakeEngine) -> None:
    """One hangs, one comes in drips; after the deadline the connection is closed, so that the engine stops too."""
    slow = {1000: fake.Hang(), 1001: fake.Drip(seconds=1.0)}
    engine.script(lambda call: slow.pop(call.generations[0].prompt_ids[1], None))
    prompts = [make_prompt(number, max_new_tokens=10) for number in range(5)]
    outcomes = await generate_all(kafka, engine, prompts, request_seconds="1", token_seconds="0.01", attempts="2")
    attempts = [outcome.attempts for outcome in outcomes if isinstance(outcome, Sequence)]
    assert attempts == [2, 2, 1, 1, 1]
    assert len(engine.ended) == len(engine.started), "the engine goes on with a request that nobody waits for"


async def test_an_answer_that_drips_in_time_is_whole(kafka: Kafka, engine: FakeEngine) -> None:
    engine.script(fake.Drip(seconds=0.05))
    prompt = make_prompt(1)
    (outcome,) = await generate_all(kafka, engine, [prompt], attempts="1")
    assert isinstance(outcome, Sequence)
    assert outcome.output_ids == expected_output(prompt.prompt_ids, prompt.sampling)


async def test_a_full_engine_costs_a_prompt_no_attempt(
    kafka: Kafka, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine.script(fake.QueueFull(), fake.QueueFull(), fake.Status(429, "", {"Retry-After": "3"}))
    (outcome,) = await generate_all(kafka, engine, [make_prompt(1)], attempts="1")
    assert isinstance(outcome, Sequence)
    assert outcome.attempts == 4
    assert re.search(r"answered 429: ; again in 3\.0 s", caplog.text), "Retry-After is a lower bound"


async def test_what_was_generated_and_not_kept_is_counted_by_cause(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(0), make_prompt(1), make_prompt(2, max_new_tokens=4)])
    faults = {1000: fake.Abort(after=3), 1001: fake.NaN()}
    engine.script(lambda call: faults.pop(call.generations[0].prompt_ids[1], None))
    await mark_idle(kafka, "run")
    generator = make_generator(kafka, engine, truncated="drop")
    async with running(generator, "run") as (_, task):
        await asyncio.wait_for(task, 60)
    assert (wasted(generator, "abort"), wasted(generator, "truncated")) == (3, 4)
    assert wasted(generator, FailureReason.NAN) == len(
        expected_output(make_prompt(1).prompt_ids, make_prompt(1).sampling)
    )


async def test_behind_a_router_a_prompt_that_kills_workers_is_found(kafka: Kafka) -> None:
    """The router answers 500 where its worker was lost; which one that was, nobody can tell."""
    deaths: list[float] = []

    model = FakeModel(FACTS, latency=lambda _: 0.1)
    async with FakeEngine(model, on_death=lambda: deaths.append(time.monotonic())) as engine:
        engine.script(lambda call: fake.Death() if poisons(call) else None)
        runner, url = await router([engine.url])
        supervisor = asyncio.create_task(revived(engine, deaths))
        try:
            killer, *innocent = await generate_all(
                kafka, engine, [make_prompt(number) for number in range(12)], engines=url, router_retries_off="true",
                window="4",
            )  # fmt: skip
        finally:
            supervisor.cancel()
            await runner.cleanup()
    assert isinstance(killer, Failure)
    assert killer.reason == FailureReason.ENGINE_KILLER
    assert all(isinstance(outcome, Sequence) for outcome in innocent)
    assert asked(engine)[tuple(make_prompt(0).prompt_ids)] == 3, "twice among others, once alone"


async def test_an_engine_that_is_not_ready_gets_nothing_new(kafka: Kafka, engine: FakeEngine) -> None:
    """SGLang takes requests while it drains after SIGTERM: only /ready says no."""
    async with FakeEngine() as draining:
        draining.ready = False
        prompts = [make_prompt(number) for number in range(20)]
        await generate_all(kafka, engine, prompts, engines=f"{draining.url},{engine.url}")
    assert (len(draining.started), len(engine.started)) == (0, 20)


async def test_the_drain_ends_at_its_deadline_and_closes_connections(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(4)])
    engine.script(lambda call: fake.Hang())
    async with running(make_generator(kafka, engine), drain_seconds=0.5) as (context, task):
        await eventually(lambda: len(engine.started) == 4)
        context.stopping.set()
        await asyncio.wait_for(task, 30)
    await eventually(lambda: len(engine.ended) == 4)  # as a real engine does within 4 s
    assert await read_outcomes(kafka) == []


async def test_a_second_signal_ends_at_once(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(4)])
    engine.script(lambda call: fake.Hang())
    process = tokenhaul(
        "generate",
        TOKENHAUL_KAFKA_BOOTSTRAP=kafka.address,
        TOKENHAUL_KAFKA_PREFIX=kafka.settings.prefix,
        TOKENHAUL_GENERATOR_ENGINES=engine.url,
        TOKENHAUL_METRICS_PORT=str(free_ports(1)[0]),
        TOKENHAUL_DRAIN_SECONDS="600",
    )
    await eventually(lambda: len(engine.started) == 4)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    while "SIGTERM" not in (line := await asyncio.to_thread(process.stdout.readline)):
        assert line, "it ended without a word"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == -signal.SIGTERM
    await eventually(lambda: len(engine.ended) == 4)


async def test_prompts_that_were_deleted_before_they_were_done_end_the_generator(
    kafka: Kafka, engine: FakeEngine
) -> None:
    prompts = [make_prompt(number) for number in range(12)]
    await generate_all(kafka, engine, prompts)
    await publish(kafka, [make_prompt(number) for number in range(12, 60)])
    async with kafka.started(kafka.admin) as admin:
        for partition in await partitions_of(admin, kafka.topics.prompts):
            await admin.delete_records({TopicPartition(*partition): RecordsToDelete(-1)})
    async with running(make_generator(kafka, engine)) as (_, task):
        with pytest.raises(Fatal, match=r"but all is done only below \d+: prompts in between were deleted"):
            await asyncio.wait_for(task, 30)
    assert len(engine.started) == 12


async def test_a_record_that_is_no_prompt_is_a_failure_under_its_id(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    good, bad = make_prompt(0), make_prompt(1)
    await publish(kafka, [good])
    async with kafka.started(kafka.producer) as producer:
        for headers in ([("id", bad.id)], []):
            await producer.send_and_wait(
                kafka.topics.prompts, b"nonsense", partition=ids.partition(bad.id, PARTITIONS), headers=headers
            )
    await mark_idle(kafka, "run")
    async with running(make_generator(kafka, engine), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    outcomes = await read_outcomes(kafka)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert [failure.reason for failure in failures] == [FailureReason.UNDECODABLE] * 2
    assert bad.id in {failure.id for failure in failures}
    assert all(f"{kafka.topics.prompts}/" in failure.detail for failure in failures)
    assert sum(isinstance(outcome, Sequence) for outcome in outcomes) == 1


async def test_an_outcome_that_kafka_would_refuse_is_a_failure(
    kafka: Kafka, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes_module, "MAX_VALUE_BYTES", 2000)
    large = make_prompt(0, prompt_ids=[1, 1000, *range(3, 3000)])
    refused, fine = await generate_all(kafka, engine, [large, make_prompt(1)])
    assert isinstance(refused, Failure)
    assert (refused.reason, refused.prompt) == (FailureReason.TOO_LARGE, None)
    assert isinstance(fine, Sequence)


async def test_an_engine_that_ignores_seeds_is_named_once(
    kafka: Kafka, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await generate_all(kafka, engine, [make_prompt(number) for number in range(3)])
    assert caplog.text.count("ignores sampling_seed") == 1
