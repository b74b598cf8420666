"""A line of OpenAI's batch API: a chat request with its own sampling, in OpenAI's names, made SGLang's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.ingest.record import Own
from services.ingest.sampling import Sampling
from services.kernel.errors import Reject

ROUTE = "/chat/completions"
_ASKED = {"messages", "tools"}
_NAMES = {"min_tokens": "min_new_tokens"}
# They change who is asked and how the answer is delivered, not what the answer is. A seed every record has of its own.
_WITHOUT_EFFECT = {
    "model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "seed", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "logprobs", "top_logprobs",
}  # fmt: skip
_ANY_OBJECT = '{"type":"object"}'


class _Limits(msgspec.Struct):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None


def read(record: dict[str, Any]) -> tuple[dict[str, Any], Own]:
    """(messages and tools, what the request asks for itself). Raises Reject for what would change the answer and
    cannot be asked of /generate."""
    url, body = record.get("url"), record.get("body")
    if url is not None and not str(url).endswith(ROUTE):
        raise Reject("bad_field", f"`url` is {url!r}: only requests to {ROUTE} are read")
    if not isinstance(body, dict):
        raise Reject("bad_field", "`body` must be an object")
    given = {key: value for key, value in body.items() if value is not None and key not in _WITHOUT_EFFECT}
    asked = {key: given.pop(key) for key in _ASKED & given.keys()}
    if (choice := given.pop("tool_choice", "auto")) not in ("auto", "none"):
        raise Reject("bad_sampling", f"body.tool_choice {choice!r} cannot be asked of /generate, only auto and none")
    if choice == "none":
        asked.pop("tools", None)
    limits = {key: given.pop(key) for key in _Limits.__struct_fields__ if key in given}
    schema = _schema(given.pop("response_format", None))
    values = {_NAMES.get(key, key): value for key, value in given.items()}
    if unknown := sorted(values.keys() - set(Sampling.__struct_fields__)):
        raise Reject("bad_sampling", f"body.{unknown[0]} is no sampling parameter SGLang knows")
    try:
        read_limits = msgspec.convert(limits, _Limits)
        sampling = msgspec.convert(values | schema, Sampling).given()
    except msgspec.ValidationError as error:
        raise Reject("bad_sampling", f"body: {error}") from error
    longest = read_limits.max_completion_tokens or read_limits.max_tokens
    return asked, Own(sampling, longest, read_limits.n)


def _schema(format: Any) -> dict[str, str]:
    kind = format.get("type") if isinstance(format, dict) else format
    if kind in (None, "text"):
        return {}
    if kind == "json_object":
        return {"json_schema": _ANY_OBJECT}
    schema = format.get("json_schema") if isinstance(format, dict) and kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise Reject("bad_sampling", f"body.response_format of type {kind!r} cannot be read")
    return {"json_schema": msgspec.json.encode(schema["schema"]).decode()}
