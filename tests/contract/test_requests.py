"""Requests on their way: ids, aborts, clients that leave, slots and the queue."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.recordings import (
    PROMPT,
    assert_consistent,
    assert_same_shape,
    body_of,
    events,
    events_of,
    load,
    replay,
)
from tests.contract.subjects import OWN, Subject, client_of, started, until


class Run:
    """A request under way on an engine, and what the engine says of its load."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    def start(self, rid: str, count: int = 400, **fields: Any) -> asyncio.Task[httpx.Response]:
        """Ask for `count` ids, which takes seconds."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        request = {"input_ids": PROMPT, "sampling_params": sampling, "rid": rid, **fields}
        return asyncio.create_task(self._client.post("/generate", json=request))

    async def until(self, *, running: int, waiting: int = 0, tokens: int = 0) -> None:
        """Poll until the engine has so many requests, and at least so many tokens in them."""

        async def reached() -> bool:
            load = (await self._client.get("/v1/loads")).json()["loads"][0]
            counts = (load["num_running_reqs"], load["num_waiting_reqs"])
            return counts == (running, waiting) and load["num_used_tokens"] >= tokens

        await until(reached)

    async def abort(self, **fields: Any) -> None:
        """POST /abort_request."""
        answer = await self._client.post("/abort_request", json=fields)
        assert (answer.status_code, answer.text) == (200, "")


@pytest.fixture
def run(client: httpx.AsyncClient) -> Run:
    return Run(client)


async def test_a_rid_cannot_be_used_twice_at_a_time(client: httpx.AsyncClient, run: Run) -> None:
    first = run.start("dup-1")
    await run.until(running=1)
    second = await replay(client, "14b-dup-rid-second")
    await run.abort(rid="dup-1")
    await first

    assert (second.status_code, second.json()) == (400, body_of("14b-dup-rid-second"))
    assert (await run.start("dup-1", count=2)).status_code == 200  # recording 14a: reuse after the end


async def test_aborted_request_ends_with_what_it_has(run: Run) -> None:
    task = run.start("ab-1")
    await run.until(running=1, tokens=len(PROMPT) + 1)
    await run.abort(rid="ab-1")
    answer = await task

    assert answer.status_code == 200
    recorded = body_of("14c-aborted-nonstream")
    body = answer.json()
    assert_same_shape(recorded, body)
    assert body["meta_info"]["finish_reason"] == recorded["meta_info"]["finish_reason"]
    assert 0 < len(body["output_ids"]) < 400
    assert body["meta_info"]["completion_tokens"] == len(body["output_ids"])


async def test_aborted_stream_ends_with_an_abort(run: Run) -> None:
    task = run.start("ab-2", stream=True)
    await run.until(running=1, tokens=len(PROMPT) + 1)
    await run.abort(rid="ab-2")

    last = events((await task).text)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_matches_by_prefix(run: Run) -> None:
    tasks = [run.start("req-1"), run.start("req-10")]
    other = run.start("other")
    await run.until(running=3)
    await run.abort(rid="req-1")
    reasons = [(await task).json()["meta_info"]["finish_reason"]["type"] for task in tasks]
    await run.until(running=1)
    await run.abort(rid="other")
    await other

    recorded = body_of("14i-prefix-collision-req-10")["meta_info"]["finish_reason"]["type"]
    assert reasons == ["abort", recorded]


async def test_abort_all(run: Run) -> None:
    tasks = [run.start("a"), run.start("b")]
    await run.until(running=2)
    await run.abort(abort_all=True)

    assert [(await task).json()["meta_info"]["finish_reason"]["type"] for task in tasks] == ["abort"] * 2


@pytest.mark.parametrize("case", ["14e-abort-unknown-rid", "14e2-abort-empty"])
async def test_abort_of_nothing_is_fine(case: str, client: httpx.AsyncClient) -> None:
    answer = await replay(client, case)

    assert (answer.status_code, answer.text) == (200, load(case)["response"]["body"])


async def test_an_empty_abort_aborts_nothing(run: Run) -> None:
    task = run.start("stays")
    await run.until(running=1)
    await run.abort()
    assert (await run.start("meanwhile", count=2)).status_code == 200

    await run.until(running=1)
    await run.abort(rid="stays")
    await task


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(stream: bool, run: Run) -> None:
    task = run.start("leaves", stream=stream)
    await run.until(running=1)
    task.cancel()

    await run.until(running=0)  # a real server looks every 4 s (recording 14h)
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("engine", OWN, indirect=True)
async def test_requests_beyond_the_slots_wait_and_end(run: Run) -> None:
    first = [run.start(f"long-{number}") for number in range(4)]
    await run.until(running=4)
    others = [run.start(f"short-{number}", count=2) for number in range(3)]
    await run.until(running=4, waiting=3)
    await run.abort(rid="long-")
    await asyncio.gather(*first)

    for task in others:
        assert_consistent((await task).json(), len(PROMPT))


async def test_full_queue(narrow_engine: Subject) -> None:
    async with client_of(narrow_engine) as client:
        run = Run(client)
        running = run.start("q1")
        await run.until(running=1)
        queued = run.start("q2")
        await run.until(running=1, waiting=1)

        loads = (await client.get("/v1/loads")).json()["loads"][0]
        metrics = (await client.get("/metrics")).text
        refused = await replay(client, "34-q-full")
        refused_batch = await replay(client, "34b2-q-full-batch")
        refused_stream = await replay(client, "34b-q-full-stream")
        await run.abort(rid="q")
        answers = [(await task).json() for task in (queued, running)]

    recorded = body_of("34c-loads-while-full")["loads"][0]
    for name in ("num_running_reqs", "num_waiting_reqs", "max_running_requests"):
        assert loads[name] == recorded[name]
    assert 'sglang:num_queue_reqs{engine_type="unified"' in metrics
    assert metrics.split("sglang:num_queue_reqs{")[1].splitlines()[0].endswith("} 1.0")
    for answer in (refused, refused_batch):
        assert (answer.status_code, answer.json()) == (503, body_of("34-q-full"))
    assert refused_stream.status_code == 200
    (chunk,), (recorded_chunk,) = events(refused_stream.text), events_of("34b-q-full-stream")
    assert_same_shape(recorded_chunk, chunk)
    assert chunk["meta_info"]["finish_reason"] == recorded_chunk["meta_info"]["finish_reason"]
    recorded_queued = body_of("34-q-queued")
    assert_same_shape(recorded_queued, answers[0])
    assert answers[0]["meta_info"].keys() == recorded_queued["meta_info"].keys()
    assert answers[0]["meta_info"]["finish_reason"] == recorded_queued["meta_info"]["finish_reason"]
    assert answers[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_queue_is_first_in_first_out(mortal_engine: Subject) -> None:
    order: list[str] = []
    async with client_of(mortal_engine) as client:
        run = Run(client)
        tasks = []
        for waiting, (rid, count) in enumerate([("first", 400), ("second", 20), ("third", 2)]):
            task = run.start(rid, count)
            task.add_done_callback(lambda done: order.append(done.result().json()["meta_info"]["id"]))
            tasks.append(task)
            await run.until(running=1, waiting=waiting)
        await run.abort(rid="first")
        await asyncio.gather(*tasks)

    assert order == ["first", "second", "third"]


async def test_local_engine_logs_what_it_generated(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with started("local", "--log", str(log)) as subject:
        async with client_of(subject) as client:
            answer = (await Run(client).start("logged", count=3)).json()
    (entry,) = [json.loads(line) for line in log.read_text().splitlines()]

    assert entry == {
        "rid": "logged",
        "input_ids": PROMPT,
        "output_ids": answer["output_ids"],
        "finish_reason": {"type": "length", "length": 3},
    }


async def test_a_client_that_leaves_the_queue_is_forgotten(narrow_engine: Subject) -> None:
    async with client_of(narrow_engine) as client:
        run = Run(client)
        first = run.start("g1")
        await run.until(running=1)
        second = run.start("g2")
        await run.until(running=1, waiting=1)
        second.cancel()
        await run.until(running=1, waiting=0)
        await run.abort(rid="g1")
        await asyncio.gather(first, second, return_exceptions=True)
