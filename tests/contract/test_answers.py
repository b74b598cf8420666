"""Recorded answers with status 200: the same request gives the same shape, and from SmolLM2 the same ids."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from services.local.engine.command import TOKENIZER
from services.local.engine.llama import load_tokenizer
from tests.contract.recordings import (
    PROMPT,
    assert_consistent,
    assert_same_shape,
    body_of,
    events,
    events_of,
    replay,
)
from tests.contract.subjects import SMOLLM2, Subject

# Greedy, answered by SmolLM2. That its 4-bit file gives the ids of bf16 here was measured and is no law.
GREEDY = [
    "01-greedy-stop",
    "02-no-stop-trim",
    "02b-no-stop-trim-no-skip-special",
    "03-length",
    "03b-max-new-0",
    "03c-max-new-1",
    "04-stop-token-ids",
    "05-stop-string",
    "05b-stop-string-no-trim",
    "05c-stop-string-mid-token",
    "05d-stop-string-multi-token",
    "05e-stop-regex",
    "06-min-new-tokens",
    "07-ignore-eos",
    "09-batch",
    "09b-batch-per-item-sp",
    "09d-batch-one",
    "11-logprob",
    "13c-text-and-ids",
    "13g-unknown-top-level",
    "13u-max-new-null",
    "13v-n-0",
    "14-client-rid",
    "15j-custom-params",
    "15m-eos-first-token",
    "18-return-prompt-token-ids",
]
# Sampled, or answered by a random model.
OTHERS = [
    "01c-no-sampling-params",
    "07c-ignore-eos-plus-stop_token_ids",
    "07d-stop_token_ids-only",
    "08-n2",
    "19c-stop-empty-string",
    "19d-put",
]
STREAMS = ["10-stream", "10b-stream-stop", "10e-stream-interval"]
LINE = "🎉🚀日本語 naïve 한국"
EMOJI = f"<|im_start|>user\nRepeat: {LINE}<|im_end|>\n<|im_start|>assistant\n{LINE}\n🎉"

on_smollm2 = pytest.mark.parametrize("engine", SMOLLM2, indirect=True)


def sequences(body: Any) -> list[dict[str, Any]]:
    """The sequences of a body, which is a list for a batch or n > 1."""
    return body if isinstance(body, list) else [body]


async def generate(client: httpx.AsyncClient, sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The answer to a greedy request for the usual prompt."""
    request = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, **sampling}, **fields}
    answer = await client.post("/generate", json=request)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("case", GREEDY + OTHERS)
async def test_answer_has_the_recorded_shape(case: str, client: httpx.AsyncClient) -> None:
    recorded = body_of(case)
    answer = await replay(client, case)

    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert_same_shape(recorded, answer.json(), left_out=frozenset({"finish_reason"}))
    for ours, theirs in zip(sequences(answer.json()), sequences(recorded), strict=True):
        assert ours["meta_info"]["finish_reason"]["type"] in {"stop", "length"}
        assert_consistent(ours, theirs["meta_info"]["prompt_tokens"])


@on_smollm2
@pytest.mark.parametrize("case", GREEDY)
async def test_answer_has_the_recorded_ids(case: str, client: httpx.AsyncClient) -> None:
    answer = await replay(client, case)

    for ours, theirs in zip(sequences(answer.json()), sequences(body_of(case)), strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["text"] == theirs["text"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


@pytest.mark.parametrize("case", STREAMS)
async def test_stream_has_the_recorded_shape(case: str, client: httpx.AsyncClient) -> None:
    recorded = events_of(case)
    answer = await replay(client, case)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(answer.text)
    # The time at which the first chunk was sent is no fact that anybody can use.
    assert_same_shape(recorded[0], chunks[0], left_out=frozenset({"response_sent_to_client_ts"}))
    assert_same_shape(recorded[-1], chunks[-1], left_out=frozenset({"finish_reason"}))
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert_consistent(chunks[-1], len(PROMPT))


@pytest.mark.parametrize("case", STREAMS)
async def test_stream_is_cumulative(case: str, client: httpx.AsyncClient) -> None:
    chunks = events((await replay(client, case)).text)

    assert len(chunks) > 1
    for shorter, longer in pairwise(chunks):
        count = len(shorter["output_ids"])
        assert longer["output_ids"][:count] == shorter["output_ids"]
        assert shorter["meta_info"]["completion_tokens"] == count


@pytest.mark.parametrize("case", ["10-stream", "10e-stream-interval"])
async def test_stream_has_the_recorded_steps(case: str, client: httpx.AsyncClient) -> None:
    chunks = events((await replay(client, case)).text)

    steps = [len(chunk["output_ids"]) for chunk in chunks]
    assert steps == [len(chunk["output_ids"]) for chunk in events_of(case)]


async def test_stream_of_a_batch_tells_its_sequences_apart(client: httpx.AsyncClient) -> None:
    request = {"input_ids": [PROMPT, PROMPT[:20]], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    answer = await client.post("/generate", json=request)

    finished = {chunk["index"]: chunk for chunk in events(answer.text) if chunk["meta_info"]["finish_reason"]}
    assert {index: chunk["meta_info"]["prompt_tokens"] for index, chunk in finished.items()} == {0: 42, 1: 20}


async def test_stop_token_stays_in_the_ids_and_leaves_the_text(client: httpx.AsyncClient) -> None:
    free = await generate(client, {"max_new_tokens": 6})
    stop = free["output_ids"][3]
    stopped = await generate(client, {"max_new_tokens": 6, "stop_token_ids": [stop]})
    shown = await generate(client, {"max_new_tokens": 6, "stop_token_ids": [stop], "no_stop_trim": True})

    assert stopped["output_ids"] == shown["output_ids"] == free["output_ids"][:4]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(stopped["text"]) < len(shown["text"])
    assert shown["text"].startswith(stopped["text"])


async def test_stop_string_keeps_all_ids_up_to_its_end(client: httpx.AsyncClient) -> None:
    free = await generate(client, {"max_new_tokens": 6})
    head = await generate(client, {"max_new_tokens": 3})
    stop = free["text"][len(head["text"]) - 2 : len(head["text"]) + 2]  # across two tokens
    stopped = await generate(client, {"max_new_tokens": 6, "stop": [stop]})

    assert stopped["output_ids"] == free["output_ids"][:4]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stopped["text"] == head["text"][:-2]


async def test_stop_on_the_last_allowed_id_is_a_stop(client: httpx.AsyncClient) -> None:
    free = await generate(client, {"max_new_tokens": 4})
    stop = free["output_ids"][-1]
    stopped = await generate(client, {"max_new_tokens": 4, "stop_token_ids": [stop]})

    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_ignore_eos_keeps_eos_inside_and_switches_stop_ids_off(client: httpx.AsyncClient) -> None:
    free = await generate(client, {"max_new_tokens": 100})
    assert free["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    length = len(free["output_ids"]) + 4
    sampling = {"max_new_tokens": length, "ignore_eos": True, "stop_token_ids": free["output_ids"][:1]}
    answer = await generate(client, sampling)

    assert answer["output_ids"][: len(free["output_ids"])] == free["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": length}


async def test_min_new_tokens_holds_eos_back(client: httpx.AsyncClient) -> None:
    free = await generate(client, {"max_new_tokens": 100})
    least = len(free["output_ids"]) + 2
    answer = await generate(client, {"max_new_tokens": 100, "min_new_tokens": least})

    assert 2 not in answer["output_ids"][:least]
    assert len(answer["output_ids"]) >= least


@pytest.mark.parametrize("stream", [False, True])
@on_smollm2
async def test_ids_of_incomplete_characters_are_there(stream: bool, client: httpx.AsyncClient) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    request = {
        "input_ids": tokenizer.encode(EMOJI).ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 17},
        "stream": stream,
    }
    answer = await client.post("/generate", json=request)

    last = events(answer.text)[-1] if stream else answer.json()
    assert len(last["output_ids"]) == 17
    assert last["text"] == tokenizer.decode(last["output_ids"])
    assert last["text"].startswith("🚀日本語")


async def test_an_exact_fit_is_taken(client: httpx.AsyncClient, engine: Subject) -> None:
    longest = engine.context - len(PROMPT)
    first = (await generate(client, {"max_new_tokens": 1}))["output_ids"]
    answer = await generate(client, {"max_new_tokens": longest, "stop_token_ids": first})

    assert answer["output_ids"] == first  # recording 13p3


async def test_a_batch_with_n_is_flat(client: httpx.AsyncClient) -> None:
    request = {"input_ids": [PROMPT, PROMPT[:20]], "sampling_params": {"max_new_tokens": 2, "n": 2}}
    answers = (await client.post("/generate", json=request)).json()

    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [42, 42, 20, 20]


@pytest.mark.parametrize("engine", ["local"], indirect=True)
async def test_local_engine_refuses_bent_log_probabilities(client: httpx.AsyncClient) -> None:
    sampling = {"temperature": 0.5, "max_new_tokens": 2}
    request = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    answer = await client.post("/generate", json=request)

    assert answer.status_code == 400
    assert "local engine" in answer.json()["error"]["message"]


@pytest.mark.parametrize("engine", ["local"], indirect=True)
async def test_local_engine_repeats_a_seed(client: httpx.AsyncClient) -> None:
    # A real server ignores sampling_seed without --enable-deterministic-inference (recordings 15).
    sampling = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    answers = [await generate(client, {**sampling, "sampling_seed": seed}) for seed in (7, 7, 8)]
    first, again, other = (answer["output_ids"] for answer in answers)

    assert first == again
    assert first != other
