"""How an answer is to be sampled: everything stands in the prompt, nothing is left to an engine's defaults.

/generate samples at temperature 1.0 for 128 tokens when told nothing, and knows nothing of generation_config.json. The
chat route of SGLang applies five values of that file; so does `resolve`, with SGLang's own defaults for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.kernel.errors import Fatal, Reject

FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
SET_ELSEWHERE = {
    "max_new_tokens": "it is a key of the source itself",
    "n": "use `samples` of the source: each sample is a record of its own",
    "sampling_seed": "it is derived from the record id, so that every sample has its own",
}

_TokenId = Annotated[int, Meta(ge=0)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of SGLang 0.5.23 that a source may give, with SGLang's bounds. None: not given."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    stop_regex: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    logit_bias: dict[Annotated[str, Meta(pattern=r"^\d+$")], float] | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: Annotated[int, Meta(ge=1)] | None = None
    watermark: Any = None
    choice: Any = None

    def given(self) -> dict[str, Any]:
        """What was given, by SGLang's names. top_k 0, which Hugging Face takes for "off", is SGLang's -1."""
        values = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if values.get("top_k") == 0:
            values["top_k"] = -1
        return values


class Share(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sampling of several: of all prompts, `weight` of the sum of weights are asked this way."""

    weight: Annotated[float, Meta(gt=0)] = 1.0

    def given(self) -> dict[str, Any]:
        values = super().given()
        del values["weight"]
        return values


def resolve(
    asked: Sampling, generation: Mapping[str, Any], end_ids: Iterable[int], vocab_size: int, source: str
) -> dict[str, Any]:
    """All parameters but max_new_tokens and the seed. What the source asks wins over the model's generation_config.

    Raises Fatal for a source with ids outside the vocabulary (an engine may die of them) or with no end id at all."""
    try:
        resolved = merge({**DEFAULTS, **generation, "stop_token_ids": sorted(set(end_ids))}, asked.given(), vocab_size)
    except Reject as reject:
        raise Fatal(f"source {source!r}: {reject.detail}") from None
    if not resolved["stop_token_ids"]:
        raise Fatal(
            f"source {source!r}: neither config.json, generation_config.json nor the tokenizer names an end id, so no "
            "answer would ever end: set TOKENHAUL_INGEST_STOP_TOKEN_IDS"
        )
    return resolved


def merge(resolved: Mapping[str, Any], given: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """`resolved` with what is `given` in its place; stop_token_ids are united. Raises Reject for ids beyond the
    vocabulary."""
    stop = sorted({*resolved["stop_token_ids"], *given.get("stop_token_ids", ())})
    ids = [*stop, *map(int, given.get("logit_bias", {}))]
    if outside := [id for id in ids if id >= vocab_size]:
        raise Reject("bad_sampling", f"stop_token_ids or logit_bias name {outside}, beyond vocab_size {vocab_size}")
    return {**resolved, **given, "stop_token_ids": stop}


def chosen(weights: Sequence[float], prompt_id: bytes) -> int:
    """Which of the weighted samplings a prompt is asked with: the same for the same prompt, whoever asks."""
    point = int.from_bytes(prompt_id[:8], "big") / 2**64 * sum(weights)
    return next((n for n, reached in enumerate(accumulate(weights)) if point < reached), len(weights) - 1)
