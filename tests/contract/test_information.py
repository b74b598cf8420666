"""The GET routes, /v1/tokenize, and the end of an engine."""

from __future__ import annotations

import re
import signal

import httpx
import pytest

from schemas.control import Probe, Probes
from services.generator import tokenizer
from services.generator.http import HttpClient
from tests.contract.recordings import (
    PROMPT,
    assert_consistent,
    assert_same_shape,
    body_of,
    load,
    replay,
)
from tests.contract.subjects import SMOLLM2, Subject, client_of, until
from tests.contract.test_requests import Run

EMPTY = ["20-GET-health", "20-GET-ready", "20-GET-ping"]
# case: keys of the recording that our engines leave out, because they have nothing true to say there.
INFORMATION: dict[str, set[str]] = {
    "20-GET-model_info": {"load_format", "disaggregation_mode", "model_type", "architectures"},
    "20-GET-get_model_info": {"load_format", "disaggregation_mode", "model_type", "architectures"},
    "20-GET-server_info": {
        "context_length",  # null there: the model's own; ours is a setting
        "max_total_tokens",
        "max_queued_requests",  # null or a number
        "dtype",
        "enable_deterministic_inference",
        "enable_custom_logit_processor",
        "enable_return_hidden_states",
        "stream_interval",
        "random_seed",
        "launch_command",
        "internal_states",
    },
    "20-GET-v1_loads": {
        "num_waiting_uncached_tokens",
        "num_active_tokens",
        "num_prealloc_ready_tokens",
        "total_prefill_uncached_tokens",
        "total_prefill_busy_us",
        "decode_moments",
        "memory",
        "disaggregation",
        "prealloc_ready",
    },
    "20-GET-v1_models": set(),
}
INFORMATION["20-GET-get_server_info"] = INFORMATION["20-GET-server_info"]
# Recording 20b (metrics are 404 without --enable-metrics) is not followed: our engines always have them.
METRICS = {
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "num_retracted_reqs",
    "num_requests_total",
    "num_aborted_requests_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "queue_time_seconds",
}
SAMPLE = re.compile(r"^sglang:(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


def samples(text: str) -> dict[str, dict[str, float]]:
    """Value by name and label names; values of one name and the same label names are added up."""
    found: dict[str, dict[str, float]] = {}
    for match in SAMPLE.finditer(text):
        names = ",".join(sorted(re.findall(r"(\w+)=", match["labels"])))
        series = found.setdefault(match["name"], {})
        series[names] = series.get(names, 0.0) + float(match["value"])
    return found


async def not_ready(client: httpx.AsyncClient) -> bool:
    """Whether /ready says so."""
    return (await client.get("/ready")).status_code == 503


@pytest.mark.parametrize("case", EMPTY)
async def test_probe_of_a_well_engine(case: str, client: httpx.AsyncClient) -> None:
    answer = await replay(client, case)

    assert (answer.status_code, answer.text) == (200, load(case)["response"]["body"])


@pytest.mark.parametrize("case", INFORMATION)
async def test_information_has_the_recorded_shape(case: str, client: httpx.AsyncClient) -> None:
    answer = await replay(client, case)

    assert answer.status_code == 200
    assert_same_shape(body_of(case), answer.json(), left_out=frozenset(INFORMATION[case]))


async def test_loads_are_zero_when_idle(client: httpx.AsyncClient) -> None:
    await Run(client).until(running=0)
    load = (await client.get("/v1/loads")).json()["loads"][0]
    recorded = body_of("20-GET-v1_loads")["loads"][0]

    for name in ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage"):
        assert load[name] == recorded[name]


@pytest.mark.parametrize("engine", SMOLLM2, indirect=True)
async def test_tokenize_gives_the_recorded_ids(client: httpx.AsyncClient, engine: Subject) -> None:
    answer = await replay(client, "17g-tokenize")

    assert answer.json() == {**body_of("17g-tokenize"), "max_model_len": engine.context}


async def test_a_tokenizer_is_held_against_probes(engine: Subject) -> None:
    if engine.name == "fake":
        pytest.skip("its tokenizer is none of a model")
    texts = [Probe("hello world", [28120, 905]), Probe("<|im_start|>hello", [1, 28120])]
    probes = Probes(tokenizer_fingerprint="", probes=texts)
    async with HttpClient() as http:
        assert await tokenizer.disagreement(http, engine.url, probes) is None
        texts[1] = Probe("<|im_start|>hello", [1, 28121])
        said = await tokenizer.disagreement(http, engine.url, probes)
    assert said is not None
    assert "'<|im_start|>hello' ingest made 2 ids, at 0 [1, 28121], /v1/tokenize makes 2, there [1, 28120]" in said


async def test_text_is_tokenized_as_tokenize_does(client: httpx.AsyncClient) -> None:
    case = "19b-generate-input-ids-null"
    text = load(case)["request"]["json"]["text"]
    tokens = (await client.post("/v1/tokenize", json={"model": "x", "prompt": text})).json()
    answer = await replay(client, case)

    assert_same_shape(body_of("17g-tokenize"), tokens)
    assert_same_shape(body_of(case), answer.json())
    assert_consistent(answer.json(), tokens["count"])


async def test_metrics_have_the_names_and_labels_of_a_server(client: httpx.AsyncClient) -> None:
    # A series is there once something was counted in it.
    for stream in (True, False):
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "stream": stream}
        await client.post("/generate", json=body)
    run = Run(client)
    aborted = run.start("counted-as-aborted")
    await run.until(running=1)
    await run.abort(rid="counted-as-aborted")
    await aborted
    answer = await client.get("/metrics")

    assert answer.headers["content-type"] == load("20-GET-metrics")["response"]["headers"]["content-type"]
    ours = samples(answer.text)
    plain = {re.sub("_(bucket|sum|count)$", "", name) for name in ours}
    assert plain >= METRICS
    for name, series in samples(body_of("20-GET-metrics")).items():
        assert ours[name].keys() == series.keys()


async def test_counters_count(client: httpx.AsyncClient) -> None:
    async def read() -> dict[str, float]:
        names = {"num_requests_total": 1, "prompt_tokens_total": 42, "generation_tokens_total": 3}
        found = samples((await client.get("/metrics")).text)
        return {name: sum(found[name].values()) for name in names}

    await Run(client).until(running=0)
    before = await read()
    sampling = {"max_new_tokens": 3, "ignore_eos": True}
    await client.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling})
    after = await read()

    grown = {name: after[name] - before[name] for name in after}
    assert grown == {"num_requests_total": 1, "prompt_tokens_total": 42, "generation_tokens_total": 3}


async def test_sigterm_lets_running_and_queued_finish(mortal_engine: Subject) -> None:
    async with client_of(mortal_engine) as client:
        run = Run(client)
        running = run.start("s1", count=300)
        await run.until(running=1)
        queued = run.start("s2", count=2)
        await run.until(running=1, waiting=1)
        mortal_engine.send_signal(signal.SIGTERM)
        await until(lambda: not_ready(client))
        health = await client.get("/health")
        late = run.start("s3", count=2)  # new ones are taken as well
        answers = [(await task).json() for task in (running, queued, late)]
        status = await mortal_engine.exit_status()

    assert health.status_code == load("35b-health-after-sigterm")["response"]["status"]
    assert load("35b2-ready-after-sigterm")["response"]["status"] == 503
    assert_same_shape(body_of("35-sigterm-queued"), answers[1])
    assert [len(answer["output_ids"]) for answer in answers] == [300, 2, 2]
    for answer in answers:
        assert_consistent(answer, len(PROMPT))
    assert status == load("35d-sigterm-exit")["exit_code"]


async def test_a_second_signal_ends_at_once(mortal_engine: Subject) -> None:
    async with client_of(mortal_engine) as client:
        run = Run(client)
        task = run.start("s1")
        await run.until(running=1)
        mortal_engine.send_signal(signal.SIGTERM)
        await until(lambda: not_ready(client))
        mortal_engine.send_signal(signal.SIGTERM)
        status = await mortal_engine.exit_status()
        with pytest.raises(httpx.TransportError):
            await task

    assert status == -signal.SIGTERM
