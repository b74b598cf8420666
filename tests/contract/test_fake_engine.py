"""The fake's own promises: its ids can be predicted, every fault shows, its log counts generations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.recordings import assert_consistent, events
from tests.contract.subjects import client_of, started, until
from tests.support.fake_engine import (
    FACTS,
    Abort,
    BadRequest,
    Capped,
    CompletionTokens,
    Death,
    Drip,
    Drop,
    FakeEngine,
    Fault,
    Hang,
    Latency,
    NaN,
    NoOutputIds,
    OutOfRange,
    PromptPrefix,
    PromptTokens,
    QueueFull,
    Reset,
    Status,
    expected_output,
)

PROMPT = [11, 12, 13, 14, 15]
EXPECTED = expected_output(PROMPT)


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(slots=2) as engine:
        yield engine


@pytest.fixture
async def client(fake: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fake.url, timeout=30) as opened:
        yield opened


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    """Generate for the usual prompt."""
    return await client.post("/generate", json={"input_ids": PROMPT, **fields})


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0},
        {"max_new_tokens": 3},
        {"max_new_tokens": 0},
        {"max_new_tokens": 60, "ignore_eos": True},
        {"stop_token_ids": [EXPECTED[4]]},
        {"stop": [f"{EXPECTED[5]}"]},
        {"min_new_tokens": 50},
        {"sampling_seed": 9},
    ],
)
async def test_output_is_the_predicted_one(sampling: dict[str, Any], client: httpx.AsyncClient) -> None:
    body = (await ask(client, sampling_params=sampling)).json()

    assert body["output_ids"] == expected_output(PROMPT, sampling)
    assert_consistent(body, len(PROMPT))


async def test_samples_and_seeds_differ(client: httpx.AsyncClient) -> None:
    bodies = (await ask(client, sampling_params={"n": 2})).json()

    outputs = [body["output_ids"] for body in bodies]
    assert outputs == [expected_output(PROMPT, {"n": 2}, sample=sample) for sample in (0, 1)]
    assert outputs[0] != outputs[1] != expected_output(PROMPT, {"sampling_seed": 9})


def test_sequences_end_with_eos_by_default() -> None:
    assert EXPECTED[-1] in FACTS.eos_ids
    assert not FACTS.eos_ids & set(EXPECTED[:-1])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Abort(after=2), {"output_ids": EXPECTED[:2], "reason": "abort", "completion_tokens": 2}),
        (Capped(at=4), {"output_ids": EXPECTED[:4], "reason": "length", "completion_tokens": 4}),
        (NaN(), {"output_ids": EXPECTED, "reason": "stop", "matched": "NaN happened"}),
        (PromptPrefix(count=2), {"output_ids": PROMPT[:2] + EXPECTED, "completion_tokens": len(EXPECTED)}),
        (OutOfRange(), {"output_ids": [*EXPECTED[:-1], FACTS.vocab_size]}),
        (NoOutputIds(), {"output_ids": None}),
        (CompletionTokens(off_by=2), {"output_ids": EXPECTED, "completion_tokens": len(EXPECTED) + 2}),
        (PromptTokens(off_by=-2), {"output_ids": EXPECTED, "prompt_tokens": len(PROMPT) - 2}),
        (Latency(seconds=0.01), {"output_ids": EXPECTED}),
        (Drip(seconds=0.001), {"output_ids": EXPECTED}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_fault_in_a_200(
    stream: bool,
    fault: Fault,
    expected: dict[str, Any],
    fake: FakeEngine,
    client: httpx.AsyncClient,
) -> None:
    fake.script(fault)
    answer = await ask(client, stream=stream)
    body = events(answer.text)[-1] if stream else answer.json()
    meta = body["meta_info"]
    reason = meta["finish_reason"]

    assert answer.status_code == 200
    shown = {"output_ids": body.get("output_ids"), "reason": reason["type"], **reason, **meta}
    assert {name: shown[name] for name in expected} == expected
    assert fake.started[0].fault == type(fault).__name__
    assert fake.ended[0].output_ids == EXPECTED  # what was generated, whatever the answer says


@pytest.mark.parametrize(
    ("fault", "status", "body"),
    [
        (QueueFull(), 503, {"object", "message", "type", "param", "code"}),
        (BadRequest("flat"), 400, {"object", "message", "type", "param", "code"}),
        (BadRequest("object"), 400, {"error"}),
        (BadRequest("string"), 400, {"error"}),
        (Status(429, '{"detail": "slow down"}', {"retry-after": "1"}), 429, {"detail"}),
    ],
)
async def test_refusal(
    fault: Fault,
    status: int,
    body: set[str],
    fake: FakeEngine,
    client: httpx.AsyncClient,
) -> None:
    fake.script(fault)
    answer = await ask(client)

    assert answer.status_code == status
    assert answer.json().keys() == body
    assert fake.ended == []


@pytest.mark.parametrize("fault", [Reset(), Drop()])
@pytest.mark.parametrize("stream", [False, True])
async def test_cut(fault: Fault, stream: bool, fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.script(fault)
    with pytest.raises(httpx.RemoteProtocolError if isinstance(fault, Drop) else httpx.TransportError):
        await ask(client, stream=stream)

    assert (await ask(client)).json()["output_ids"] == EXPECTED


async def test_hang_holds_its_slot(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.script(Hang())
    task = asyncio.create_task(ask(client))
    await until(lambda: len(fake.jobs.running) == 1)
    assert (await ask(client)).status_code == 200  # the other slot works
    task.cancel()
    await until(lambda: not fake.jobs.running)

    assert fake.ended[-1].finish_reason is not None
    assert fake.ended[-1].finish_reason["type"] == "abort"


async def test_death_drops_everything(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.script(Hang(), Death())
    innocent = asyncio.create_task(ask(client))
    await until(lambda: len(fake.jobs.running) == 1)
    with pytest.raises(httpx.TransportError):
        await ask(client)
    with pytest.raises(httpx.TransportError):
        await innocent
    with pytest.raises(httpx.ConnectError):
        await client.get("/ping")

    await fake.revive()
    assert (await ask(client)).json()["output_ids"] == EXPECTED


@pytest.mark.parametrize("prompt", [[1, -1], [1, FACTS.vocab_size], [[1], []]])
async def test_poison_is_deadly(prompt: list[Any], fake: FakeEngine, client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.TransportError):
        await client.post("/generate", json={"input_ids": prompt, "stream": True})
    with pytest.raises(httpx.ConnectError):
        await client.get("/ping")


async def test_script_is_one_step_per_request(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.script(None, QueueFull(), None)

    assert [(await ask(client)).status_code for _ in range(4)] == [200, 503, 200, 200]


async def test_script_may_be_a_function_of_the_request(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.script(lambda call: QueueFull() if call.generations[0].rid.startswith("bad") else None)

    statuses = [(await ask(client, rid=rid)).status_code for rid in ("bad-1", "good-1", "bad-2")]
    assert statuses == [503, 200, 503]


async def test_log_has_what_was_sent(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    await ask(client, rid="r1", sampling_params={"temperature": 0, "stop_token_ids": [2]})

    (entry,) = fake.started
    assert (entry.rid, entry.input_ids) == ("r1", PROMPT)
    assert entry.sampling_params == {"temperature": 0, "stop_token_ids": [2]}


async def test_not_ready(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.ready = False

    assert [(await client.get(path)).status_code for path in ("/ready", "/health", "/ping")] == [
        503,
        503,
        200,
    ]


async def test_process_takes_a_script_and_writes_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    script = json.dumps([{"type": "Abort", "after": 1}, None])
    with started("fake", "--log", str(log), "--script", script) as subject:
        async with client_of(subject) as client:
            reasons = [(await ask(client, rid=f"r{number}")).json()["meta_info"] for number in range(2)]
            await client.post("/fake/script", json=[{"type": "QueueFull"}])
            refused = await ask(client)
            await client.post("/fake/ready", json=False)
            ready = await client.get("/ready")
    entries = [json.loads(line) for line in log.read_text().splitlines()]

    assert [meta["finish_reason"]["type"] for meta in reasons] == ["abort", "stop"]
    assert (refused.status_code, ready.status_code) == (503, 503)
    assert [entry["type"] for entry in entries] == ["Started", "Ended", "Started", "Ended", "Started"]
    assert [entry["input_ids"] for entry in entries] == [PROMPT] * 5
    assert entries[1]["output_ids"] == EXPECTED


async def test_latency_of_a_process_is_the_same_for_the_same_prompt() -> None:
    with started("fake", "--latency", "0.01", "--latency-sigma", "0.5") as subject:
        async with client_of(subject) as client:
            assert (await ask(client)).json()["output_ids"] == EXPECTED
