"""The generator and its engines: deaths, strangers, routers, budgets, cancellations, truncated outputs, producers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaTimeoutError

from schemas.sequences import Failure, FailureReason, Sequence
from services.kernel.kafka import Kafka
from services.local.engine.request import Call, Facts
from tests.integration.test_generator import asked, generate_all, make_generator
from tests.support import fake_engine as fake
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel, expected_output
from tests.support.processes import tokenhaul
from tests.support.stream import create_topics, eventually, make_prompt, mark_idle, publish, read_outcomes, running

POISON = 1000
DYING_SECONDS = 1.1


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FakeModel(FACTS, latency=lambda _: 0.05)) as engine:
        yield engine


def poisons(call: Call) -> bool:
    return bool(call.generations[0].prompt_ids[1] == POISON)


async def revived(engine: FakeEngine, deaths: list[float]) -> None:
    """A supervisor: start the engine again whenever it died."""
    while True:
        await eventually(lambda: len(deaths) > 0, 600)
        deaths.clear()
        await asyncio.sleep(0.3)  # how long it takes to load
        await engine.revive()


async def test_a_prompt_that_kills_engines_is_found_and_the_innocent_pay_nothing(kafka: Kafka) -> None:
    deaths: list[float] = []
    total = 0

    def died() -> None:
        nonlocal total
        total += 1
        deaths.append(time.monotonic())

    model = FakeModel(FACTS, latency=lambda _: 0.05)
    async with FakeEngine(model, on_death=died) as engine:
        engine.script(lambda call: fake.Death() if poisons(call) else None)
        supervisor = asyncio.create_task(revived(engine, deaths))
        prompts = [make_prompt(number) for number in range(40)]
        outcomes = await generate_all(kafka, engine, prompts, attempts="1", window="4")
        supervisor.cancel()
    killer, *innocent = outcomes
    assert isinstance(killer, Failure)
    assert (killer.reason, total) == (FailureReason.ENGINE_KILLER, 3), "twice among others, once alone"
    assert all(isinstance(outcome, Sequence) for outcome in innocent), "charged an attempt for somebody else's poison"
    last = killer.rids[-1]
    running_with_it = [s for s in engine.started if s.rid == last]
    assert len(running_with_it) == 1


async def test_a_lost_connection_to_an_engine_that_lives_is_an_attempt(kafka: Kafka, engine: FakeEngine) -> None:
    engine.script(lambda call: fake.Drop() if poisons(call) else None)
    (outcome,) = await generate_all(kafka, engine, [make_prompt(0)], attempts="2")
    assert isinstance(outcome, Failure)
    assert (outcome.reason, outcome.attempts) == (FailureReason.RETRIES_EXHAUSTED, 2)


async def test_an_engine_with_another_model_gets_nothing(kafka: Kafka, engine: FakeEngine) -> None:
    stranger_facts = Facts("another-model", "0.5.23", vocab_size=49152, context_length=8192, eos_ids=frozenset({2}))
    async with FakeEngine(FakeModel(stranger_facts)) as stranger:
        urls = f"{stranger.url},{engine.url}"
        prompts = [make_prompt(number) for number in range(30)]
        outcomes = await generate_all(kafka, engine, prompts, engines=urls)
        assert not stranger.started
    assert all(isinstance(outcome, Sequence) for outcome in outcomes)


async def test_the_label_can_be_mapped_to_what_engines_call_the_model(kafka: Kafka) -> None:
    async with FakeEngine(FakeModel(replace(FACTS, model="/models/x"))) as engine:
        (outcome,) = await generate_all(kafka, engine, [make_prompt(0)], model_path="/models/x")
    assert isinstance(outcome, Sequence)


async def router(workers: list[str]) -> tuple[web.AppRunner, str]:
    """What a sglang-router answers (sglang-contract 40-*), requests passed to the first worker."""

    async def upstream(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as app[http]:
            yield

    async def generate(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            async with request.app[http].post(
                f"{workers[0]}/generate", data=body, headers={"content-type": "application/json"}
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        except aiohttp.ClientError as error:
            if not isinstance(error, aiohttp.ClientConnectorError):
                await asyncio.sleep(DYING_SECONDS)  # how long a process takes to die
            lost = {"error": {"type": "Internal Server Error", "code": "call_upstream_request_error"}}
            return web.json_response(lost, status=500)

    http = web.AppKey("http", aiohttp.ClientSession)
    app = web.Application()
    app.cleanup_ctx.append(upstream)
    app.router.add_post("/generate", generate)
    answers: dict[str, dict[str, object]] = {
        "/readiness": {"status": "ready", "healthy_workers": 1, "total_workers": 1},
        "/get_server_info": {"router_manager": True, "routers_count": 1, "workers_count": 1},
        "/get_model_info": {"model_path": "fake", "weight_version": "default"},
        "/v1/models": {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "local"}]},
    }
    for path, body in answers.items():
        app.router.add_get(path, partial(_answer, body))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _answer(body: dict[str, object], request: web.Request) -> web.Response:
    return web.json_response(body)


async def test_a_router_is_used_only_when_its_retries_are_known_to_be_off(
    kafka: Kafka, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    runner, url = await router([engine.url])
    try:
        await create_topics(kafka)
        await publish(kafka, [make_prompt(0)])
        async with running(make_generator(kafka, engine, engines=url)):
            await eventually(lambda: "--disable-retries" in caplog.text)
        assert not engine.started
        await mark_idle(kafka, "run")
        async with running(make_generator(kafka, engine, engines=url, router_retries_off="true"), "run") as (_, task):
            await asyncio.wait_for(task, 60)
        (outcome,) = await read_outcomes(kafka)
        assert isinstance(outcome, Sequence)
        assert outcome.engine_version is None
    finally:
        await runner.cleanup()


async def test_a_budget_halts_the_group_until_somebody_says_resume(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(300)]
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    limits = {"max_rows": "50", "window": "4"}
    async with running(make_generator(kafka, engine, **limits), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    made = len(await read_outcomes(kafka))
    assert 50 <= made < 250, "stopped soon after"
    assert len(engine.started) == made, "what was in flight was finished"
    async with running(make_generator(kafka, engine, **limits), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    assert len(await read_outcomes(kafka)) == made, "the halt survives a restart"
    environ = {"TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address, "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix}
    resume = tokenhaul("resume", **environ)
    output = (await asyncio.to_thread(resume.communicate, timeout=30))[0]
    assert "max_rows 50 reached" in output
    async with running(make_generator(kafka, engine), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    assert Counter(asked(engine).values()) == {1: 300}


async def test_a_cancelled_source_fails_without_an_engine(kafka: Kafka, engine: FakeEngine) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(20)])
    environ = {"TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address, "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix}
    cancel = tokenhaul("cancel", "--source", "test", **environ)
    said = (await asyncio.to_thread(cancel.communicate, timeout=30))[0]
    assert "will fail as cancelled" in said
    assert "ingest has read nothing of a source 'test'; there are: none" in said, "the prompts are not ingest's here"
    later = [make_prompt(number) for number in range(20, 25)]
    await publish(kafka, later)
    await mark_idle(kafka, "run")
    async with running(make_generator(kafka, engine), "run") as (_, task):
        await asyncio.wait_for(task, 60)
    outcomes = await read_outcomes(kafka)
    assert Counter(type(outcome).__name__ for outcome in outcomes) == {"Failure": 20, "Sequence": 5}
    assert {o.reason for o in outcomes if isinstance(o, Failure)} == {FailureReason.CANCELLED}
    assert set(asked(engine)) == {tuple(prompt.prompt_ids) for prompt in later}


async def test_a_source_is_cancelled_although_no_engine_is_well(kafka: Kafka, engine: FakeEngine) -> None:
    engine.ready = False
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(200)])  # more than wait for a place
    await mark_idle(kafka, "run")
    generator = make_generator(kafka, engine)
    async with running(generator, "run") as (_, task):
        taken = ("tokenhaul_records_in_total", {"stage": "generator"})
        await eventually(lambda: (generator.metrics.registry.get_sample_value(*taken) or 0) >= 128)
        environ = {"TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address, "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix}
        cancel = tokenhaul("cancel", "--source", "test", **environ)
        await asyncio.to_thread(cancel.communicate, timeout=30)
        await asyncio.wait_for(task, 30)
    assert {outcome.reason for outcome in await read_outcomes(kafka) if isinstance(outcome, Failure)} == {"cancelled"}
    assert not engine.started


LONG = make_prompt(7, max_new_tokens=4)


async def test_truncated_outputs_are_kept_flagged_dropped_or_continued(kafka: Kafka, engine: FakeEngine) -> None:
    whole = expected_output(LONG.prompt_ids, {"temperature": 0.0, "max_new_tokens": 1000})
    (kept,) = await generate_all(kafka, engine, [LONG])
    assert isinstance(kept, Sequence)
    assert (kept.finish_reason, kept.output_ids, kept.engine_capped) == ("length", whole[:4], False)


async def test_dropped(kafka: Kafka, engine: FakeEngine) -> None:
    (dropped,) = await generate_all(kafka, engine, [LONG], truncated="drop")
    assert isinstance(dropped, Failure)
    assert dropped.reason == FailureReason.TRUNCATED


async def test_continued_until_the_cap(kafka: Kafka, engine: FakeEngine) -> None:
    (continued,) = await generate_all(kafka, engine, [LONG], truncated="continue", continue_tokens="10")
    assert isinstance(continued, Sequence)
    assert (continued.finish_reason, continued.segments) == ("length", [4, 4, 2])
    assert (len(continued.output_ids), continued.effective_max_new_tokens) == (10, 10)
    sent = [started.input_ids for started in engine.started]
    assert sent[1] == LONG.prompt_ids + continued.output_ids[:4], "what was generated is not paid for again"
    assert sent[2] == LONG.prompt_ids + continued.output_ids[:8]


async def test_a_kv_capped_output_is_flagged(kafka: Kafka, engine: FakeEngine) -> None:
    engine.script(fake.Capped(at=2))
    (capped,) = await generate_all(kafka, engine, [make_prompt(1)], truncated="continue")
    assert isinstance(capped, Sequence)
    assert (capped.finish_reason, capped.engine_capped, len(capped.output_ids)) == ("length", True, 2)


async def test_log_probabilities_are_kept_on_request(kafka: Kafka, engine: FakeEngine) -> None:
    (outcome,) = await generate_all(kafka, engine, [make_prompt(1)], logprobs="true")
    assert isinstance(outcome, Sequence)
    assert outcome.logprobs is not None
    assert list(outcome.logprobs) == pytest.approx([-(id % 89) / 89 for id in outcome.output_ids])


async def test_a_failed_produce_replaces_the_producer_and_loses_nothing(
    kafka: Kafka, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired batches, as a leaderless partition makes them (a fault one broker cannot be made to show)."""
    send = AIOKafkaProducer.send
    broken: set[int] = set()

    async def failing(self: AIOKafkaProducer, topic: str, *args: object, **kwargs: object) -> object:
        if topic.endswith(".sequences") and len(broken) < 2 and id(self) not in broken and len(engine.ended) > 20:
            broken.add(id(self))
        if id(self) in broken and topic.endswith(".sequences"):
            expired = asyncio.get_running_loop().create_future()
            expired.set_exception(KafkaTimeoutError())
            return expired
        return await send(self, topic, *args, **kwargs)

    monkeypatch.setattr(AIOKafkaProducer, "send", failing)
    prompts = [make_prompt(number) for number in range(100)]
    outcomes = await generate_all(kafka, engine, prompts)
    assert len(broken) == 2
    assert all(isinstance(outcome, Sequence) for outcome in outcomes)
    assert Counter(asked(engine).values()) == {1: 100}


async def test_sigterm_finishes_what_is_in_flight_and_sends_nothing_new(kafka: Kafka) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(200)])
    async with FakeEngine(FakeModel(FACTS, latency=lambda _: 0.5), slots=8) as engine:
        async with running(make_generator(kafka, engine, window="8")) as (context, task):
            await eventually(lambda: len(engine.started) >= 16)
            context.stopping.set()
            await asyncio.wait_for(task, 30)
        assert len(await read_outcomes(kafka)) == len(engine.started) == len(engine.ended)
