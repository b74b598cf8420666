"""Recorded refusals: the same request gives the same status and, where it is static, the same body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.contract.recordings import (
    PROMPT,
    assert_same_shape,
    body_of,
    events,
    events_of,
    first_lines,
    load,
    replay,
)
from tests.contract.subjects import VOCAB_SIZE, Subject, client_of

SAME_BODY = [
    "11d-hidden-states",
    "13-empty-input-ids",
    "13b-no-input",
    "13f-unknown-sp",
    "13h-max-tokens-alias",
    "13i-temp-negative",
    "13k-top-p-0",
    "13r-get-generate",
    "13s-unknown-path",
    "13w-sampling-params-list-mismatch",
    "15c-custom-logit-processor",
    "15l-json-schema-grammar-none",
    "15n-lora-path",
    "19f-rid-with-batch-list-wrong-len",
    "20-GET-get_load",
]
# Flat objects: their message ends with a place in SGLang's source, which is not compared.
SAME_FINDINGS = [
    "13e-empty-body",
    "13l-input-ids-strings",
    "13q-content-type-text",
    "13x-top-level-list",
    "14a2-rid-int",
    "16b-oov-int64-overflow",
]
# Their message quotes the JSON parser, which is another one here.
SAME_SHAPE = ["13d-malformed-json"]
LENGTHS: dict[str, Callable[[int], tuple[int, int]]] = {
    # case: (prompt, max_new_tokens), given the context; the recording has them for a context of 8192.
    "13n-input-too-long": lambda context: (context + 108, 2),
    "13o-input-exactly-ctx": lambda context: (context, 2),
    "13p-input-plus-max-too-long": lambda context: (42, context + 808),
}
# Deviations on purpose. Of these a real server dies, or (13y) it invents tokens for nothing. The local engine
# refuses them and says so; the fake dies of all four, so that a client that sends them is found out.
POISON = ["13y-empty-in-batch", "16a-oov-negative", "16c-oov-ge-vocab", "19h-empty-batch"]


@pytest.mark.parametrize("case", SAME_BODY)
async def test_refusal_has_the_recorded_body(case: str, client: httpx.AsyncClient) -> None:
    recorded = load(case)["response"]
    answer = await replay(client, case)

    assert answer.status_code == recorded["status"]
    assert answer.headers["content-type"].startswith(recorded["headers"]["content-type"])
    # A set, which the server writes in any order.
    assert set(answer.headers.get("allow", "").split(", ")) == set(recorded["headers"].get("allow", "").split(", "))
    assert (answer.text if isinstance(recorded["body"], str) else answer.json()) == recorded["body"]


@pytest.mark.parametrize("case", SAME_FINDINGS)
async def test_refusal_has_the_recorded_findings(case: str, client: httpx.AsyncClient) -> None:
    answer = await replay(client, case)

    assert answer.status_code == 400
    recorded, body = body_of(case), answer.json()
    assert first_lines(body["message"]) == first_lines(recorded["message"])
    assert {**body, "message": ""} == {**recorded, "message": ""}


@pytest.mark.parametrize("case", SAME_SHAPE)
async def test_refusal_has_the_recorded_shape(case: str, client: httpx.AsyncClient) -> None:
    answer = await replay(client, case)

    assert answer.status_code == 400
    recorded, body = body_of(case), answer.json()
    assert_same_shape(recorded, body)
    assert body["message"].split("'input'")[0] == recorded["message"].split("'input'")[0]


@pytest.mark.parametrize("case", LENGTHS)
async def test_too_long(case: str, client: httpx.AsyncClient, engine: Subject) -> None:
    prompt, longest = LENGTHS[case](engine.context)
    sampling = {"temperature": 0, "max_new_tokens": longest}
    answer = await client.post("/generate", json={"input_ids": [5] * prompt, "sampling_params": sampling})

    assert answer.status_code == 400
    message = body_of(case)["error"]["message"]
    for recorded, ours in (
        ("8300", f"{prompt}"),
        ("8192", f"{engine.context}"),
        ("9042", f"{prompt + longest}"),
        ("9000", f"{longest}"),
    ):
        message = message.replace(recorded, ours)
    assert answer.json() == {"error": {"message": message}}


async def test_one_bad_prompt_refuses_its_batch(client: httpx.AsyncClient, engine: Subject) -> None:
    request = {"input_ids": [PROMPT, [5] * (engine.context + 1)], "sampling_params": {"max_new_tokens": 2}}
    answer = await client.post("/generate", json=request)

    assert answer.status_code == load("13z-batch-one-invalid")["response"]["status"]
    assert_same_shape(body_of("13z-batch-one-invalid"), answer.json())


async def test_refusal_of_a_stream_is_an_event(client: httpx.AsyncClient) -> None:
    answer = await replay(client, "10c-stream-error-bad-sp")

    assert answer.status_code == 200
    assert events(answer.text) == events_of("10c-stream-error-bad-sp")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 1.5),
        ("top_k", 0),
        ("min_p", -0.1),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("min_new_tokens", 17),
        ("max_new_tokens", -1),
        ("logit_bias", {str(VOCAB_SIZE): 1.0}),
    ],
)
async def test_values_out_of_range_are_refused(name: str, value: Any, client: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 16, name: value}
    answer = await client.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling})

    assert answer.status_code == 400
    assert name in answer.text


def poisonous(case: str) -> Any:
    """The recorded request of a case that kills a real server."""
    return load(case)["request"]["json"]


@pytest.mark.parametrize("engine", ["local"], indirect=True)
@pytest.mark.parametrize("case", POISON)
async def test_local_engine_refuses_what_a_server_dies_of(case: str, client: httpx.AsyncClient) -> None:
    answer = await client.post("/generate", json=poisonous(case))

    assert answer.status_code == 400
    assert "real SGLang" in answer.json()["error"]["message"]
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("mortal_engine", ["fake"], indirect=True)
@pytest.mark.parametrize("case", POISON)
async def test_fake_dies_of_what_a_server_dies_of(case: str, mortal_engine: Subject) -> None:
    async with client_of(mortal_engine) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/generate", json=poisonous(case))

    assert await mortal_engine.exit_status() == 137
