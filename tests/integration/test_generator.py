"""The generator between a real Kafka and a fake engine: nothing lost, paid for twice, or kept that is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from schemas import ids
from schemas.prompts import Prompt
from schemas.sequences import Failure, FailureReason, Sequence
from services.generator import service
from services.generator.service import Generator
from services.kernel.errors import Fatal
from services.kernel.groups import group_offsets, partitions_of
from services.kernel.kafka import Kafka
from services.kernel.logs import JsonFormatter
from services.kernel.watermark import Tracker
from tests.support import fake_engine as fake
from tests.support.cluster import tool
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel, expected_output
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


def make_generator(kafka: Kafka, engine: FakeEngine, **settings: str) -> Generator:
    environ = {
        "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
        "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
        "TOKENHAUL_KAFKA_SESSION_TIMEOUT_SECONDS": "6",
        "TOKENHAUL_GENERATOR_ENGINES": engine.url,
    }
    return service.make(environ | {f"TOKENHAUL_GENERATOR_{name.upper()}": value for name, value in settings.items()})


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


def asked(engine: FakeEngine) -> Counter[tuple[int, ...]]:
    """Generations started, by prompt."""
    return Counter(tuple(started.input_ids) for started in engine.started)


async def committed(kafka: Kafka) -> dict[int, tuple[int, str]]:
    async with kafka.started(kafka.admin) as admin:
        partitions = await partitions_of(admin, kafka.topics.prompts)
        return await group_offsets(admin, kafka.topics.generator_group, partitions)


async def generate_all(kafka: Kafka, engine: FakeEngine, prompts: list[Prompt], **settings: str) -> list[object]:
    """Publish, generate until idle, and give back the outcomes in the order of `prompts`."""
    await create_topics(kafka)
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    async with running(make_generator(kafka, engine, **settings), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    outcomes = {outcome.record_id: outcome for outcome in await read_outcomes(kafka)}
    return [outcomes[prompt.id] for prompt in prompts]


async def test_every_prompt_becomes_the_sequence_the_engine_made(kafka: Kafka, engine: FakeEngine) -> None:
    prompts = [make_prompt(number) for number in range(100)]
    outcomes = await generate_all(kafka, engine, prompts)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert isinstance(outcome, Sequence)
        assert outcome.prompt == prompt
        assert outcome.output_ids == expected_output(prompt.prompt_ids, prompt.sampling)
        assert (outcome.finish_reason, outcome.matched_stop, outcome.output_ids[-1]) == ("stop", 2, 2)
    assert all(started.sampling_params["sampling_seed"] == by_ids(prompts, started).seed for started in engine.started)
    assert set(asked(engine).values()) == {1}
    assert len({started.rid for started in engine.started}) == len({len(s.rid) for s in engine.started}) * 100


def by_ids(prompts: list[Prompt], started: fake.Started) -> Prompt:
    return next(prompt for prompt in prompts if prompt.prompt_ids == started.input_ids)


REFUSED = [
    (fake.BadRequest("object"), FailureReason.ENGINE_REJECTED),
    (fake.BadRequest("string"), FailureReason.ENGINE_REJECTED),
    (fake.BadRequest("flat"), FailureReason.ENGINE_REJECTED),
    (fake.NaN(), FailureReason.NAN),
    (fake.PromptPrefix(), FailureReason.COMPLETION_TOKENS_MISMATCH),
    (fake.CompletionTokens(), FailureReason.COMPLETION_TOKENS_MISMATCH),
    (fake.PromptTokens(), FailureReason.PROMPT_TOKENS_MISMATCH),
    (fake.OutOfRange(), FailureReason.OUTPUT_OUT_OF_VOCABULARY),
    (fake.Status(200, "[1, 2]"), FailureReason.BAD_ANSWER),
]


async def test_an_inconsistent_answer_is_refused_under_its_name(kafka: Kafka, engine: FakeEngine) -> None:
    prompts = [make_prompt(number) for number in range(len(REFUSED))]
    script = {1000 + number: fault for number, (fault, _) in enumerate(REFUSED)}
    engine.script(lambda call: script.get(call.generations[0].prompt_ids[1]))
    outcomes = await generate_all(kafka, engine, prompts)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert [failure.reason for failure in failures] == [reason for _, reason in REFUSED]
    assert all(failure.detail and failure.rids and failure.prompt for failure in failures)


PASSING = [
    fake.Drop(),
    fake.Reset(),
    fake.Abort(),
    fake.QueueFull(),
    fake.Status(500, "Internal Server Error"),
    fake.Status(429, "", {"Retry-After": "1"}),
    fake.Status(200, '{"text": "cut'),
]


async def test_what_can_pass_is_asked_again(kafka: Kafka, engine: FakeEngine) -> None:
    engine.script(*PASSING)
    prompts = [make_prompt(number) for number in range(len(PASSING))]
    outcomes = await generate_all(kafka, engine, prompts)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert isinstance(outcome, Sequence), outcome
        assert outcome.output_ids == expected_output(prompt.prompt_ids, prompt.sampling)
    assert sum(outcome.attempts for outcome in outcomes if isinstance(outcome, Sequence)) == 2 * len(PASSING)


async def test_eight_attempts_on_a_healthy_engine_are_enough(kafka: Kafka, engine: FakeEngine) -> None:
    engine.script(lambda call: fake.Status(500, "no") if call.generations[0].prompt_ids[1] == 1000 else None)
    failed, fine = await generate_all(kafka, engine, [make_prompt(0), make_prompt(1)], attempts="3")
    assert isinstance(failed, Failure)
    assert (failed.reason, failed.attempts) == (FailureReason.RETRIES_EXHAUSTED, 3)
    assert isinstance(fine, Sequence)


async def test_an_id_that_would_kill_the_engine_is_never_sent(kafka: Kafka, engine: FakeEngine) -> None:
    prompts = [make_prompt(0, prompt_ids=[1, 49152]), make_prompt(1, prompt_ids=[-1, 5]), make_prompt(2)]
    negative, beyond, fine = await generate_all(kafka, engine, prompts)
    assert isinstance(negative, Failure)
    assert isinstance(beyond, Failure)
    assert {negative.reason, beyond.reason} == {FailureReason.PROMPT_OUT_OF_VOCABULARY}
    assert isinstance(fine, Sequence)
    assert len(engine.started) == 1


async def test_an_engine_that_is_down_fails_nothing(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(20)]
    await publish(kafka, prompts)
    await engine.die()
    async with running(make_generator(kafka, engine, attempts="1")) as (context, _):
        await eventually(lambda: not context.health.not_ready)  # Kafka is there: a pod must not be restarted
        await engine.revive()
        await eventually(lambda: len(engine.ended) == 20)
        await eventually(lambda: _all_outcomes(kafka, 20))
    assert all(isinstance(outcome, Sequence) for outcome in await read_outcomes(kafka))


async def _all_outcomes(kafka: Kafka, count: int) -> bool:
    return len(await read_outcomes(kafka)) == count


async def test_an_engine_without_output_ids_ends_the_generator_with_what_to_do(
    kafka: Kafka, engine: FakeEngine
) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(0)])
    engine.script(fake.NoOutputIds())
    async with running(make_generator(kafka, engine)) as (_, task):
        with pytest.raises(Fatal, match=r"without output_ids.*--skip-tokenizer-init"):
            await asyncio.wait_for(task, 30)


async def test_an_engine_without_output_ids_is_refused_before_any_prompt(
    kafka: Kafka, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(0)])
    engine.gives_ids = False
    async with running(make_generator(kafka, engine)):
        await eventually(lambda: "takes no work: refused" in caplog.text)
    assert "without output_ids" in caplog.text
    assert not engine.started


async def test_a_slow_request_does_not_make_finished_ones_be_paid_for_again(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(60)]
    await publish(kafka, prompts)
    slow = {(1, 1000, 2, 198), (1, 1007, 2, 198)}
    engine.script(lambda call: fake.Hang() if tuple(call.generations[0].prompt_ids) in slow else None)
    async with running(make_generator(kafka, engine)):
        await eventually(lambda: len(engine.ended) == 58)

        async def only_the_slow_ones_are_open() -> bool:
            return sum(Tracker.restore(*state).outstanding for state in (await committed(kafka)).values()) == 2

        await eventually(only_the_slow_ones_are_open)
    engine.script()
    await mark_idle(kafka, "second")
    async with running(make_generator(kafka, engine), "second") as (_, task):
        await asyncio.wait_for(task, 60)
    assert len(await read_outcomes(kafka)) == 60
    assert asked(engine) == Counter({tuple(p.prompt_ids): 1 + (tuple(p.prompt_ids) in slow) for p in prompts})


async def test_members_come_and_go_without_losing_or_repeating(kafka: Kafka) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(400)]
    model = FakeModel(FACTS, latency=lambda _: 0.02)
    async with FakeEngine(model) as engine, AsyncExitStack() as stack:
        first, second = (make_generator(kafka, engine, window="8") for _ in range(2))
        await stack.enter_async_context(running(first))
        await publish(kafka, prompts[:200])
        async with running(second) as (joined, task):
            await eventually(lambda: not joined.health.not_ready)
            await eventually(lambda: bool(_lag_shown_by(second)))
            await eventually(lambda: _lag_shown_by(first, second) == [str(number) for number in range(PARTITIONS)])
            await publish(kafka, prompts[200:])
            joined.stopping.set()
            await asyncio.wait_for(task, 60)
        await eventually(lambda: _answered(kafka, prompts), 60)
    repeated = {prompt: count for prompt, count in asked(engine).items() if count > 1}
    assert len(repeated) <= 2 * 2 * 16, "more than was in flight at the two rebalances"


def _lag_shown_by(*generators: Generator) -> list[str]:
    """The partitions whose lag is exported, as often as it is: twice would be too much in a sum."""
    families = [family for generator in generators for family in generator.metrics.registry.collect()]
    samples = [sample for family in families for sample in family.samples]
    return sorted(s.labels["partition"] for s in samples if s.name == "tokenhaul_consumer_lag_records")


async def _answered(kafka: Kafka, prompts: list[Prompt]) -> bool:
    return {outcome.record_id for outcome in await read_outcomes(kafka)} == {prompt.id for prompt in prompts}


@pytest.mark.parametrize("lost", ["the group", "one partition"])
async def test_a_group_that_lost_its_offsets_does_not_pay_again_by_itself(
    lost: str, kafka: Kafka, engine: FakeEngine
) -> None:
    prompts = [make_prompt(number) for number in range(24)]
    await generate_all(kafka, engine, prompts)
    what = ["--delete", "--group", kafka.topics.generator_group]
    if lost == "one partition":
        what = ["--delete-offsets", *what[1:], "--topic", f"{kafka.topics.prompts}:1"]
    await asyncio.to_thread(tool, kafka.settings.bootstrap, "consumer.group.ConsumerGroupCommand", *what)
    assert sorted(await committed(kafka)) == ([0, 2] if lost == "one partition" else [])
    async with running(make_generator(kafka, engine)) as (_, task):
        with pytest.raises(
            Fatal, match=r"has no offset for partition [01].*offsets were lost.* TOKENHAUL_GENERATOR_FROM_START=true"
        ):
            await asyncio.wait_for(task, 60)
    assert asked(engine) == Counter(tuple(prompt.prompt_ids) for prompt in prompts)


async def test_a_failure_is_logged_with_the_place_of_its_prompt(kafka: Kafka, engine: FakeEngine) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("tokenhaul.generator")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    engine.script(fake.BadRequest())
    prompt = make_prompt(0)
    try:
        await generate_all(kafka, engine, [prompt])
    finally:
        log.removeHandler(handler)
    (line,) = [line for line in map(json.loads, stream.getvalue().splitlines()) if line.get("action") == "failed"]
    assert (line["record"], line["topic"], line["offset"]) == (prompt.id.hex(), kafka.topics.prompts, 0)
    assert line["partition"] == ids.partition(prompt.id, PARTITIONS)
