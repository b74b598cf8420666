"""Recorded answers, and how an answer is compared with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

DIRECTORY = Path(__file__).parent / "recorded"

# The chat prompt of 42 ids that most recordings use.
_FIRST = json.loads((DIRECTORY / "01-greedy-stop.json").read_text())
PROMPT: list[int] = _FIRST["request"]["json"]["input_ids"]

# Keys that SGLang adds with --enable-metrics only: times of its own scheduler.
WITH_METRICS_ONLY = {
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
}
# null or an object, depending on what the prefix cache held.
EITHER_WAY = {"cached_tokens_details"}


def load(case: str) -> dict[str, Any]:
    """One recording, its repeated ids written out."""
    recording: dict[str, Any] = _expand(json.loads((DIRECTORY / f"{case}.json").read_text()))
    return recording


def body_of(case: str) -> Any:
    """The recorded body."""
    return load(case)["response"]["body"]


def events_of(case: str) -> list[Any]:
    """The recorded events of a stream, [DONE] excepted."""
    return events("\n".join(line for _, line in load(case)["response"]["lines"]))


def events(text: str) -> list[Any]:
    """The JSON events of a stream; raises AssertionError if it does not end with [DONE]."""
    lines = [line for line in text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def replay(client: httpx.AsyncClient, case: str) -> httpx.Response:
    """Send what was sent when the case was recorded."""
    request = load(case)["request"]
    method, path, headers = request["method"], request["path"], request.get("headers", {})
    if "raw" in request:
        headers = {"content-type": "application/json", **headers}
        return await client.request(method, path, content=request["raw"], headers=headers)
    return await client.request(method, path, json=request.get("json"), headers=headers)


def assert_same_shape(
    recorded: Any,
    actual: Any,
    left_out: frozenset[str] = frozenset(),
    at: str = "body",
) -> None:
    """Every recorded key is there with the same kind of value; `left_out` names keys that may be missing."""
    if isinstance(recorded, dict):
        assert isinstance(actual, dict), f"{at} is no object: {actual!r}"
        for key, value in recorded.items():
            if key in WITH_METRICS_ONLY or key in left_out:
                continue
            assert key in actual, f"{at}.{key} is missing"
            if key not in EITHER_WAY or (value is not None and actual[key] is not None):
                assert_same_shape(value, actual[key], left_out, f"{at}.{key}")
    elif isinstance(recorded, list) and recorded and isinstance(actual, list) and actual:
        assert_same_shape(recorded[0], actual[0], left_out, f"{at}[0]")
    else:
        assert _kind(recorded) == _kind(actual), f"{at}: {actual!r} in place of {recorded!r}"


def assert_consistent(answer: dict[str, Any], prompt_tokens: int) -> None:
    """What holds for every sequence of a well engine, whatever it generated."""
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["prompt_tokens"] == prompt_tokens
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(answer["output_ids"])}]
    reason = meta["finish_reason"]
    if reason["type"] == "length":
        assert reason["length"] == len(answer["output_ids"])
    elif isinstance(reason["matched"], int):
        assert answer["output_ids"][-1] == reason["matched"]


def first_lines(message: str) -> str:
    """A flat message without the place in SGLang's source that it ends with."""
    return message.split("\n\n  File")[0]


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(type(value))
    return "number" if isinstance(value, int | float) else type(value).__name__


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"repeat", "times"}:
            return [value["repeat"]] * value["times"]
        return {key: _expand(item) for key, item in value.items()}
    return [_expand(item) for item in value] if isinstance(value, list) else value
