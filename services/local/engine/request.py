"""The body of `POST /generate`: from bytes to the generations it asks for, or to SGLang's refusal of it.

Messages that were recorded from a real SGLang 0.5.23 stand here word for word; tests/contract compares them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from services.local.engine.errors import Poison, Refusal
from services.local.engine.sampling import Sampling, check_sampling, read_sampling

INT64_END = 1 << 63
NO_HIDDEN_STATES = (
    "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
    "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
)
NO_LOGIT_PROCESSOR = (
    "The server is not configured to enable custom logit processor. "
    "Please set `--enable-custom-logit-processor` to enable this feature."
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The model: served name, engine version, vocabulary size, tokens per request, ids that end one."""

    model: str
    version: str
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate: `sample` numbers the sequences of an `n`, `limit` is the most ids it gets."""

    rid: str
    prompt_ids: list[int]
    sampling: Sampling
    sample: int
    limit: int
    stream: bool
    return_logprob: bool
    text_in_logprobs: bool
    return_prompt_ids: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A whole request: its generations in the order of the answer, and whether the answer is a list."""

    generations: list[Generation]
    as_list: bool
    stream: bool


def decode(body: bytes, content_type: str | None) -> dict[str, Any]:
    """The request, its types checked. These refusals are HTTP 400 even when the request asks for a stream."""
    if not body:
        raise Refusal.malformed({"type": "missing", "loc": ("body",), "msg": "Field required", "input": None})
    if content_type is not None and "json" not in content_type:
        raise _not_a_dictionary(body)
    try:
        request = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise _invalid_json(body, error) from None
    if not isinstance(request, dict):
        raise _not_a_dictionary(request)
    _check_ids_type(request.get("input_ids"))
    _check_rid_type(request.get("rid"))
    given = request.get("sampling_params")
    parameters = [read_sampling(item) for item in given] if isinstance(given, list) else read_sampling(given)
    return {**request, "sampling_params": parameters}


def admit(request: dict[str, Any], facts: Facts, encode: Callable[[str], list[int]]) -> Call:
    """The generations of a decoded request.

    Raises Refusal for what a server answers with 400, Poison for what it dies of, and TypeError for the one
    shape a real server answers with 500 (a list of sampling_params next to a single prompt).
    """
    _check_features(request)
    prompts, as_list = _prompts(request, encode)
    sampling = request["sampling_params"]
    if isinstance(sampling, list):
        if not as_list or len(sampling) != len(prompts):
            raise TypeError(f"{len(sampling)} sampling_params for {len(prompts)} prompts")
    else:
        sampling = [sampling] * len(prompts)
    for prompt_ids, parameters in zip(prompts, sampling, strict=True):
        _check_length(prompt_ids, parameters, facts.context_length)
        check_sampling(parameters, facts.vocab_size)
        _check_patterns(parameters)
        _check_vocabulary(prompt_ids, facts.vocab_size)
    samples = max(parameters.n for parameters in sampling)
    rids = _rids(request.get("rid"), len(prompts), as_list)
    generations = [
        Generation(
            rid=rid if parameters.n <= 1 else uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            sampling=parameters,
            sample=sample,
            limit=_limit(parameters, facts.context_length - len(prompt_ids)),
            stream=bool(request.get("stream")),
            return_logprob=bool(request.get("return_logprob")),
            text_in_logprobs=bool(request.get("return_text_in_logprobs")),
            return_prompt_ids=bool(request.get("return_prompt_token_ids")),
        )
        for rid, prompt_ids, parameters in zip(rids, prompts, sampling, strict=True)
        for sample in range(max(parameters.n, 1))
    ]
    return Call(generations, as_list or samples > 1, bool(request.get("stream")))


def _prompts(request: dict[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    given = request.get("input_ids")
    if given is None:
        text = request.get("text")
        if text is None:
            raise Refusal.value("Either text, input_ids or input_embeds should be provided.")
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(item, str) and item for item in texts):
            raise Refusal.value("text should be a string that is not empty, or a list of such strings.")
        return [encode(item) for item in texts], isinstance(text, list)
    if not given:
        raise Refusal.value("input_ids cannot be empty.")
    if not isinstance(given[0], list):
        return [given], False
    if not all(given):
        message = "An empty prompt inside a batch: a real SGLang server dies of it or invents tokens."
        raise Poison(400, {"error": {"message": message}}, message)
    return given, True


def _rids(given: Any, prompts: int, as_list: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(prompts)]
    if isinstance(given, str):
        return [f"{given}_{index}" for index in range(prompts)] if as_list else [given]
    if len(given) != prompts or not as_list:
        raise Refusal.value("The specified rids length mismatch with the batch_size for batch processing.")
    return list(given)


def _limit(sampling: Sampling, room: int) -> int:
    return room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)


def _check_features(request: dict[str, Any]) -> None:
    if request.get("return_hidden_states"):
        raise Refusal.value(NO_HIDDEN_STATES)
    if request.get("custom_logit_processor") is not None:
        raise Refusal.value(NO_LOGIT_PROCESSOR)
    if (adapter := request.get("lora_path")) is not None:
        raise Refusal.value(
            f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        )
    if request.get("logprob_start_len") not in (None, -1) or request.get("top_logprobs_num"):
        raise Refusal.value(
            "This engine returns the log probabilities of the output ids only: "
            "logprob_start_len and top_logprobs_num are not offered."
        )


def _check_length(prompt_ids: list[int], sampling: Sampling, context: int) -> None:
    length, asked = len(prompt_ids), sampling.max_new_tokens
    if length >= context:
        raise Refusal.value(
            f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
        )
    if asked is not None and length + asked > context:
        raise Refusal.value(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {length + asked} tokens: {length} tokens from the input messages and "
            f"{asked} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )


def _check_patterns(sampling: Sampling) -> None:
    for pattern in sampling.stop_patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal.value(f"stop_regex {pattern!r} is not a regular expression: {error}.") from None


def _check_vocabulary(prompt_ids: list[int], vocab_size: int) -> None:
    for token in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token < vocab_size:
            message = f"Token id {token} is outside [0, {vocab_size}): a real SGLang server would die of it."
            raise Poison(400, {"error": {"message": message}}, message)


def _check_ids_type(given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, list):
        raise _bad_ids(given, f"expected a list; got {type(given).__name__}")
    batch = bool(given) and isinstance(given[0], list)
    for row in given if batch else [given]:
        kinds = set(map(type, row)) if isinstance(row, list) else {type(row)}
        if wrong := kinds - {int}:
            raise _bad_ids(given, f"elements must be int or list; got {wrong.pop().__name__}")
        if not isinstance(row, list):
            raise _bad_ids(given, "elements must be all int or all list")
        if row and (max(row) >= INT64_END or min(row) < -INT64_END):
            raise _bad_ids(given, "contains non-int64 element: int too big to convert")


def _check_rid_type(rid: Any) -> None:
    if rid is None or isinstance(rid, str):
        return
    if not isinstance(rid, list) or not all(isinstance(item, str) for item in rid):
        findings = [
            {"type": f"{kind}_type", "loc": ("body", "rid", name), "msg": f"Input should be a valid {kind}"}
            for kind, name in (("string", "str"), ("list", "list[str]"))
        ]
        raise Refusal.malformed(*({**finding, "input": rid} for finding in findings))


def _bad_ids(given: Any, reason: str) -> Refusal:
    finding = {"type": "value_error", "loc": ("body", "input_ids"), "msg": f"Value error, {reason}"}
    return Refusal.malformed({**finding, "input": given, "ctx": {"error": ValueError(reason)}})


def _not_a_dictionary(given: Any) -> Refusal:
    message = "Input should be a dictionary or an instance of GenerateReqInput"
    finding = {"type": "dataclass_type", "loc": ("body",), "msg": message, "input": given}
    return Refusal.malformed({**finding, "ctx": {"class_name": "GenerateReqInput"}})


def _invalid_json(body: bytes, error: msgspec.DecodeError) -> Refusal:
    try:
        json.loads(body)
        position, reason = 0, str(error)  # json is laxer than msgspec: it takes NaN, for instance
    except json.JSONDecodeError as found:
        position, reason = found.pos, found.msg
    except UnicodeDecodeError as found:
        position, reason = found.start, found.reason
    finding = {"type": "json_invalid", "loc": ("body", position), "msg": "JSON decode error", "input": {}}
    return Refusal.malformed({**finding, "ctx": {"error": reason}})
