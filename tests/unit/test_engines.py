"""Who gets the next free place on which engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from services.generator.engines import Engines
from services.generator.metrics import GeneratorMetrics
from tests.support.stream import eventually

A, B = "http://a", "http://b"


@asynccontextmanager
async def pool(
    urls: list[str], window: int, answer: Callable[[httpx.Request], httpx.Response]
) -> AsyncIterator[Engines]:
    """Engines whose probes are answered by `answer`."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        engines = Engines(urls, window, http, GeneratorMetrics())
        watching = asyncio.create_task(engines.watch())
        try:
            yield engines
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def well(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"version": "0.5.23"} if request.url.path == "/server_info" else None)


async def test_the_least_busy_engine_is_taken_and_a_full_pool_serves_in_order() -> None:
    async with pool([A, B], 2, well) as engines:
        taken = [await engines.acquire() for _ in range(4)]
        assert sorted(engine.url for engine in taken) == [A, A, B, B]
        assert taken[0].url != taken[1].url
        assert {engine.version for engine in taken} == {"0.5.23"}
        order: list[int] = []

        async def wait(number: int) -> None:
            await engines.acquire()
            order.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        engines.release(taken[0])
        engines.release(taken[1])
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), 5)
        assert order == [1, 2], "who gave up waiting takes no place; the others come in the order they asked"


async def test_a_place_given_to_somebody_who_was_cancelled_comes_back() -> None:
    async with pool([A], 1, well) as engines:
        engine = await engines.acquire()
        waiting = asyncio.create_task(engines.acquire())
        await asyncio.sleep(0)
        engines.release(engine)  # handed over ...
        waiting.cancel()  # ... in the moment it is cancelled
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await asyncio.wait_for(engines.acquire(), 5)).in_flight == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: httpx.Response(503),
        lambda request: httpx.Response(404),
        lambda request: (_ for _ in ()).throw(httpx.ConnectError("refused")),
    ],
    ids=["503", "no health route", "no connection"],
)
async def test_an_engine_that_is_not_well_gets_no_work(answer: Callable[[httpx.Request], httpx.Response]) -> None:
    def one_is_well(request: httpx.Request) -> httpx.Response:
        return well(request) if request.url.host == "a" else answer(request)

    async with pool([A, B], 2, one_is_well) as engines:
        assert [(await engines.acquire()).url for _ in range(2)] == [A, A]
        third = asyncio.create_task(engines.acquire())
        await asyncio.sleep(0)
        assert not third.done()
        third.cancel()


async def test_health_stands_in_where_there_is_no_ready_route() -> None:
    def old(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if request.url.path in ("/ready", "/server_info") else well(request)

    async with pool([A], 1, old) as engines:
        assert (await asyncio.wait_for(engines.acquire(), 5)).version is None


async def test_a_suspected_engine_is_asked_before_it_gets_work_again() -> None:
    up = True

    def answer(request: httpx.Request) -> httpx.Response:
        return well(request) if up else httpx.Response(503)

    async with pool([A], 4, answer) as engines:
        engine = await engines.acquire()
        up = False
        engines.suspect(engine)
        waiting = asyncio.create_task(engines.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        up = True
        await eventually(waiting.done)
