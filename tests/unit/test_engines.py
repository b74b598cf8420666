"""Who gets the next free place on which engine, and what is known of engines."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from schemas.control import Probe, Probes
from services.generator import engine as engine_module
from services.generator import status
from services.generator import watch as watch_module
from services.generator.engine import Engine
from services.generator.engines import Engines
from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.generator.watch import Watch
from services.generator.window import Load, Window
from services.kernel.errors import Stopped
from tests.support.http import Answering
from tests.support.stream import eventually

A, B = "http://a:1", "http://b:1"


def pool(*urls: str, window: int = 2) -> Engines:
    """Engines that take work."""
    engines = Engines()
    for url in urls:
        made = Engine(url, Window(window, window))
        made.ready = True
        engines.all.append(made)
    return engines


async def turns(count: int = 5) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_least_busy_engine_is_taken_and_a_full_pool_serves_in_order() -> None:
    engines = pool(A, B)
    async with AsyncExitStack() as first, AsyncExitStack() as rest:
        taken = [await first.enter_async_context(engines.place())]
        taken += [await rest.enter_async_context(engines.place()) for _ in range(3)]
        assert sorted(each.url for each in taken) == [A, A, B, B]
        assert taken[0].url != taken[1].url
        order: list[int] = []

        async def wait(number: int) -> None:
            async with engines.place():
                order.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await turns()
        waiting[0].cancel()
        await turns()
        await first.aclose()
        await asyncio.gather(*waiting[1:])
        assert order == [1, 2], "who gave up waiting takes no place; the others come in the order they asked"


async def test_a_place_given_to_somebody_who_was_cancelled_comes_back() -> None:
    engines = pool(A, window=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engines.place())
        waiting = asyncio.create_task(engines._acquire())
        await turns()
        await stack.aclose()  # handed over ...
        waiting.cancel()  # ... in the moment it is cancelled
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert engines.all[0].in_flight == 0


async def test_a_suspect_has_an_engine_for_itself() -> None:
    engines = pool(A, window=8)
    async with AsyncExitStack() as others:
        for _ in range(2):
            await others.enter_async_context(engines.place())
        alone: list[int] = []

        async def suspect() -> None:
            async with engines.place(alone=True) as mine:
                alone.append(mine.in_flight)

        task = asyncio.create_task(suspect())
        innocent = asyncio.create_task(engines._acquire())
        await turns()
        assert not alone, "the others are let finish first"
        assert not innocent.done(), "nobody joins an engine that is being emptied"
        await others.aclose()
        await task
        assert alone == [1]
        assert (await innocent).in_flight == 1, "and then it is everybody's again"


async def test_a_paused_pool_serves_only_who_has_begun() -> None:
    engines = pool(A, window=1)
    async with engines.place():
        new = asyncio.create_task(engines._acquire())
        await turns()
        retried = asyncio.create_task(engines._acquire(begun=True))
        await turns()
        engines.paused = True
        assert engines.waiting == 1
    engines._release(await retried)
    await turns()
    assert not new.done(), "no engine hears of it while a budget is used up"
    engines.paused, engines.new_until = False, 0.0
    engines.hand_out()
    await turns()
    assert not new.done(), "nor while the partitions may be somebody else's"
    engines.new_until = math.inf
    engines.hand_out()
    assert (await new).url == A
    assert engines.waiting == 0


async def test_a_closed_pool_gives_no_more_places() -> None:
    engines = pool(A, window=1)
    async with engines.place():
        waiting = asyncio.create_task(engines._acquire())
        await turns()
        engines.close()
        with pytest.raises(Stopped):
            await waiting
        with pytest.raises(Stopped):
            await engines._acquire()


async def test_the_verdict_on_a_lost_connection_is_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
    suspected = Engine(A, Window(1, 1))
    lost = [asyncio.create_task(suspected.died()) for _ in range(3)]
    await turns()
    suspected.probed(well=True)
    await turns()
    assert not any(task.done() for task in lost), "a dying server may answer for some seconds"
    suspected.probed(well=False)
    assert await asyncio.gather(*lost) == [True] * 3
    again = asyncio.create_task(suspected.died())
    await turns()
    now += engine_module.DYING_SECONDS
    suspected.probed(well=True)
    assert not await again


def test_a_deadline_follows_the_speed_that_was_seen() -> None:
    engine = Engine(A, Window(1, 1))
    assert engine.deadline(1000, 600.0, 0.5) == 600 + 500
    engine.finished(100, 1.0)
    assert engine.deadline(1000, 600.0, 0.5) == pytest.approx(600 + 1000 * 4 / 100), "a quarter of the usual speed"
    engine.finished(1, 10.0)
    assert engine.deadline(1000, 600.0, 0.5) > 600 + 40, "a slower one gives more time"
    slow = Engine(A, Window(1, 1))
    slow.finished(1, 10.0)
    assert slow.deadline(1000, 600.0, 0.5) == 600 + 500, "but never more than the setting"


async def test_load_is_of_all_ranks() -> None:
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25, "queues": {"retracted": 2}},
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.75, "queues": {"retracted": 1}},
    ]
    answers = {"/v1/loads": httpx.Response(200, json={"loads": ranks})}
    engine = Answering(lambda request: answers.get(request.url.path, httpx.Response(404)))
    assert await status.load(engine, A) == Load(running=7, waiting=1, usage=0.75, retracted=3)
    answers.clear()
    assert await status.load(engine, A) is None, "a router has no such route"
    answers["/v1/loads"] = httpx.Response(200, json={"detail": "?"})
    with pytest.raises(ValueError, match="/v1/loads answered 200"):
        await status.load(engine, A)


@asynccontextmanager
async def watched(
    urls: list[str],
    answer: Callable[[httpx.Request], httpx.Response],
    probes: Callable[[], Probes | None] = lambda: None,
    **given: Any,
) -> AsyncIterator[Engines]:
    """A pool that is kept true by probes which `answer` answers."""
    settings = GeneratorSettings(engines=urls, window=2, **given)
    engines = Engines()
    watch = Watch(settings, "m", probes, engines, Answering(answer), GeneratorMetrics())
    watching = asyncio.create_task(watch.run())
    try:
        yield engines
        assert not watching.done(), "whatever engines answer, they are watched"
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def well(request: httpx.Request) -> httpx.Response:
    bodies = {
        "/ready": {},
        "/get_server_info": {"model_path": "/models/m", "version": "0.5.23"},
        "/get_model_info": {"model_path": "/models/m", "weight_version": "w"},
        "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]},
    }
    body = bodies.get(request.url.path)
    return httpx.Response(404) if body is None else httpx.Response(200, json=body)


async def test_an_engine_that_is_well_is_asked_who_it_is() -> None:
    async with watched([A], well) as engines, engines.place() as found:
        assert found.identity is not None
        assert (found.identity.version, found.identity.weight_version) == ("0.5.23", "w")


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: httpx.Response(503),
        lambda request: httpx.Response(404),
        lambda request: httpx.Response(200, json={"model_path": "/models/other"}),
        lambda request: httpx.Response(200, content=b"<html>"),
        lambda request: httpx.Response(200, json={"data": ["m"], "model_path": 5, "loads": []}),
        lambda request: (_ for _ in ()).throw(httpx.ConnectError("refused")),
    ],
    ids=["503", "no health route", "another model", "another server", "another server's JSON", "no connection"],
)
async def test_an_engine_that_is_not_well_gets_no_work(answer: Callable[[httpx.Request], httpx.Response]) -> None:
    def one_is_well(request: httpx.Request) -> httpx.Response:
        return well(request) if request.url.host == "a" else answer(request)

    async with watched([A, B], one_is_well) as engines, engines.place() as one, engines.place() as two:
        assert [one.url, two.url] == [A, A]
        third = asyncio.create_task(engines._acquire())
        await turns(20)
        assert not third.done()
        third.cancel()


async def test_an_engine_without_output_ids_is_refused_before_it_gets_work(caplog: pytest.LogCaptureFixture) -> None:
    """And asked once each time it is met, with a rid as wide as every other; one that is full is met all the same."""
    asked: list[dict[str, Any]] = []
    meta = {"id": "x", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 1, "completion_tokens": 1}
    answers: dict[str, httpx.Response] = {
        "a": httpx.Response(200, json={"text": "!", "meta_info": meta}),
        "b": httpx.Response(200, json={"text": "!", "meta_info": meta, "output_ids": [5]}),
        "c": httpx.Response(503),
    }

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return well(request)
        asked.append(msgspec.json.decode(request.content))
        return answers[request.url.host]

    async with watched([A, B, "http://c:1"], answer) as engines:
        await eventually(lambda: len(asked) >= 3 and sum(engine.ready for engine in engines.all) == 2)
        assert [engine.ready for engine in engines.all] == [False, True, True]
    assert "engine a:1 takes no work: refused: the engine at http://a:1 answers without output_ids" in caplog.text
    assert "--skip-tokenizer-init" in caplog.text
    assert [len(asked[0]["rid"]), asked[0]["input_ids"], asked[0]["sampling_params"]["max_new_tokens"]] == [45, [0], 1]
    assert len({each["rid"] for each in asked}) == len(asked)


async def test_health_stands_in_where_there_is_no_ready_route() -> None:
    def old(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        return httpx.Response(404) if path == "/ready" else httpx.Response(200) if path == "/health" else well(request)

    async with watched([A], old) as engines, engines.place() as found:
        assert found.ready


async def test_an_engine_that_comes_back_is_asked_again_who_it_is() -> None:
    served, up = "/models/m", True

    def answer(request: httpx.Request) -> httpx.Response:
        if not up:
            return httpx.Response(503)
        if request.url.path == "/get_model_info":
            return httpx.Response(200, json={"model_path": served})
        return well(request)

    async with watched([A], answer) as engines:
        async with engines.place() as engine:
            up = False
            engine.probe_now.set()
            await eventually(lambda: not engine.ready)
        served, up = "/models/other", True
        engine.probe_now.set()
        await turns(50)
        assert not engine.ready, "it was started again with another model"
        served = "/models/m"
        await eventually(lambda: engine.ready)


async def test_one_engine_for_every_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (f"10.0.0.{number}", 30000)) for number in (2, 1)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    async with watched(["dns+http://sglang:30000"], well) as engines:
        await eventually(lambda: len(engines.all) == 2)
        assert [engine.url for engine in engines.all] == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
        assert [engine.name for engine in engines.all] == ["10.0.0.1:30000", "10.0.0.2:30000"]


async def test_addresses_that_come_and_go_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = ["10.0.0.1", "10.0.0.2"]

    async def addresses(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not hosts:
            raise socket.gaierror("no such name")
        return [(2, 1, 6, "", (host, 30000)) for host in hosts]

    def urls() -> list[str]:
        return sorted(engine.name for engine in engines.all)

    monkeypatch.setattr(watch_module, "_RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(watch_module, "_PROBE_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    async with watched(["dns+http://sglang:30000"], well) as engines:
        await eventually(lambda: urls() == ["10.0.0.1:30000", "10.0.0.2:30000"])
        async with engines.place() as one, engines.place() as two:
            gone = one if one.name.startswith("10.0.0.1") else two
            hosts[:] = ["10.0.0.2", "10.0.0.3"]
            await eventually(lambda: len(engines.all) == 3)
            assert gone.retired, "what it has begun may end, nothing new is sent there"
            assert not gone.free
        await eventually(lambda: urls() == ["10.0.0.2:30000", "10.0.0.3:30000"])
        hosts.clear()
        await turns(50)
        assert len(engines.all) == 2, "a name server that fails takes no engine away"


async def test_the_death_of_an_engine_that_is_given_no_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, up = ["10.0.0.1"], True

    async def addresses(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (host, 30000)) for host in hosts]

    def answer(request: httpx.Request) -> httpx.Response:
        return well(request) if up or request.url.host == "10.0.0.2" else httpx.Response(503)

    monkeypatch.setattr(watch_module, "_RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    async with watched(["dns+http://sglang:30000"], answer) as engines:
        async with engines.place() as gone:
            hosts[:] = ["10.0.0.2"]
            await eventually(lambda: gone.retired)
            up = False  # scaled down: the name lost its address first, then the process ends
        async with asyncio.timeout(10):
            assert await gone.died(), "who lost its connection there must be told, or it waits for ever"
        await eventually(lambda: [engine.name for engine in engines.all] == ["10.0.0.2:30000"])


PROBES = Probes(tokenizer_fingerprint="f", probes=[Probe("hello world", [28120, 905]), Probe("<s>hi", [1, 5])])


def tokenizing(answers: dict[str, list[int]], status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    """A well engine with this tokenizer (recording 17g-tokenize, several texts at once)."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/tokenize":
            return well(request)
        body = msgspec.json.decode(request.content)
        assert body["add_special_tokens"] is False
        tokens = [answers[text] for text in body["prompt"]]
        return httpx.Response(status, json={"tokens": tokens, "count": [len(t) for t in tokens], "max_model_len": 8192})

    return answer


OURS = {probe.text: probe.ids for probe in PROBES.probes}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (tokenizing(OURS), ""),
        (tokenizing({text: [7, *ids] for text, ids in OURS.items()}), ""),
        (tokenizing(OURS, status=404), "not compared with ingest's: /v1/tokenize answered 404"),
        (tokenizing(OURS, status=500), "not compared with ingest's: /v1/tokenize answered 500"),
    ],
    ids=["the same", "puts its BOS before everything", "no such route", "no tokenizer"],
)
async def test_an_engine_whose_tokenizer_agrees_or_cannot_be_asked_gets_work(
    answer: Callable[[httpx.Request], httpx.Response], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched([A], answer, lambda: PROBES) as engines, engines.place() as found:
        assert found.ready
    assert said in caplog.text
    assert ("not compared" in caplog.text) == bool(said)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (OURS | {"<s>hi": [1, 6]}, "of '<s>hi' ingest made 2 ids, at 0 [1, 5], /v1/tokenize makes 2, there [1, 6]"),
        (OURS | {"<s>hi": [1, 1, 5]}, "makes 3, there [1, 1, 5]"),
        (OURS | {"<s>hi": []}, "makes 0, there []"),
    ],
    ids=["another id", "one text only has a BOS more", "nothing"],
)
async def test_an_engine_whose_tokenizer_disagrees_gets_no_work(
    answers: dict[str, list[int]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched([A], tokenizing(answers), lambda: PROBES) as engines:
        await eventually(lambda: said in caplog.text)
        assert not engines.all[0].ready


async def test_probes_that_come_later_are_held_against_engines_already_met() -> None:
    known: Probes | None = None
    async with watched([A], tokenizing(OURS | {"<s>hi": [0]}), lambda: known) as engines:
        await eventually(lambda: bool(engines.all) and engines.all[0].ready)
        known = PROBES
        engines.all[0].probe_now.set()
        await eventually(lambda: not engines.all[0].ready)


async def test_no_probes_go_through_a_router() -> None:
    def router(request: httpx.Request) -> httpx.Response:
        assert request.url.path != "/v1/tokenize"
        if request.url.path == "/get_server_info":
            return httpx.Response(200, json={"router_manager": True})
        return well(request)

    async with watched([A], router, lambda: PROBES, router_retries_off=True) as engines, engines.place() as found:
        assert found.router
