"""Messages of the topic `<prefix>.sequences`: the outcome of a prompt, a sequence or a failure."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from enum import StrEnum
from typing import Literal

import msgspec

from schemas.prompts import Prompt, Reasoning

NEVER_CLOSED = -1


class FailureReason(StrEnum):
    """Why a prompt ended without a sequence. The value is a metric label: the set is closed."""

    UNDECODABLE = "undecodable"
    "The record on the prompts topic cannot be read."
    PROMPT_OUT_OF_VOCABULARY = "prompt_out_of_vocabulary"
    "A prompt id outside [0, vocab_size): sending it would kill the engine."
    ENGINE_REJECTED = "engine_rejected"
    "The engine answered 4xx: it will never take this request."
    RETRIES_EXHAUSTED = "retries_exhausted"
    "Every attempt on a healthy engine failed."
    COMPLETION_TOKENS_MISMATCH = "completion_tokens_mismatch"
    "len(output_ids) differs from completion_tokens."
    PROMPT_TOKENS_MISMATCH = "prompt_tokens_mismatch"
    "The engine counted another number of prompt tokens than were sent: it cut or changed the prompt."
    OUTPUT_OUT_OF_VOCABULARY = "output_out_of_vocabulary"
    "An output id outside [0, vocab_size)."
    EMPTY_OUTPUT = "empty_output"
    "No output id at all."
    STOP_MISMATCH = "stop_mismatch"
    "The engine says a stop id matched, but the output does not end with it."
    NAN = "nan"
    "The engine hit NaN and wrote an end id over the last token."
    BAD_ANSWER = "bad_answer"
    "Status 200, but not an answer of /generate."
    TOO_LARGE = "too_large"
    "The outcome is larger than a Kafka message may be."
    LOGPROBS_MISMATCH = "logprobs_mismatch"
    "The log probabilities are not one for each output id."
    ENGINE_KILLER = "engine_killer"
    "An engine died while this prompt alone was in flight there, after others had died with it."
    TRUNCATED = "truncated"
    "The output reached its limit, and the settings drop such outputs."
    CANCELLED = "cancelled"
    "Somebody cancelled its source before it was generated."


class Sequence(msgspec.Struct, tag="sequence.v1", frozen=True, kw_only=True, omit_defaults=True):
    """A finished generation. The row is prompt.prompt_ids + output_ids; the final stop token is in output_ids.

    `reasoning_end` is the index in the row of the last id of the close tag (see `reasoning_end`); `segments` are
    the output lengths of the requests that made the output (one, unless a truncated output was continued)."""

    prompt: Prompt
    output_ids: list[int]
    finish_reason: Literal["stop", "length"]
    matched_stop: int | str | None = None
    reasoning_end: int | None = None
    logprobs: list[float] | None = None
    rids: list[str]
    attempts: int
    effective_max_new_tokens: int
    engine_capped: bool = False
    segments: list[int]
    num_retractions: int = 0
    engine_version: str | None = None
    weight_version: str | None = None
    latency_seconds: float
    generated_at: float

    @property
    def record_id(self) -> bytes:
        """The id of the record this is the outcome of."""
        return self.prompt.id


class Failure(msgspec.Struct, tag="failure.v1", frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that will not become a row. `prompt` is absent only when the record could not be read."""

    id: bytes
    reason: FailureReason
    detail: str
    prompt: Prompt | None = None
    rids: list[str] = []
    attempts: int = 0
    failed_at: float

    @property
    def record_id(self) -> bytes:
        """The id of the record this is the outcome of."""
        return self.id


Outcome = Sequence | Failure


def reasoning_end(prompt_ids: Ids[int], output_ids: Ids[int], reasoning: Reasoning | None) -> int | None:
    """Index in prompt_ids + output_ids of the last id of the first close tag of the answer's reasoning part.

    None: no reasoning (none configured, or neither prompt nor output opens it). -1: opened and never closed. Only
    the output is searched for the close tag, but a tag may begin in the prompt: the tail of the prompt is its context.
    """
    if reasoning is None:
        return None
    opens, closes = [reasoning.open, *reasoning.open_variants], [reasoning.close, *reasoning.close_variants]
    start = max(0, len(prompt_ids) - max(map(len, closes)) + 1)
    answer = [*prompt_ids[start:], *output_ids]
    position = 0
    if not reasoning.opened:
        position = _end_of(opens, answer, len(prompt_ids) - start)
        if position < 0:
            return None
    end = _end_of(closes, answer, position)
    return NEVER_CLOSED if end < 0 else start + end - 1


def _end_of(tags: list[list[int]], ids: list[int], begin: int) -> int:
    """The index behind the first of `tags` in `ids` that stands at `begin` or later, or -1."""
    ends = [found + len(tag) for tag in tags if (found := _find(ids, tag, begin)) >= 0]
    return min(ends, default=-1)


def _find(ids: list[int], tag: list[int], begin: int) -> int:
    """First index >= begin where `tag` stands in `ids`, or -1."""
    index = begin
    try:
        while ids[(index := ids.index(tag[0], index)) : index + len(tag)] != tag:
            index += 1
    except ValueError:
        return -1
    return index
