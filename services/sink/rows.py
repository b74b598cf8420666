"""The rows of a shard: what is kept of a sequence, and the columns it is written to.

| column | what it holds |
|---|---|
| id, request_id | record id; the same over revisions of a request (32 hex digits each) |
| prompt_id | hash of the prompt's ids: the same for all samples and models (32 hex digits) |
| conversation_id, turn, sample_index, revision, source | as in the prompt |
| source_ref, sampling, chat_template_kwargs, metadata | JSON; sampling has the seed, as sampling_seed |
| input_ids, loss_mask | prompt ids then output ids; 0 for the prompt's, 1 for the output's, not shifted |
| prompt_length, output_length | in tokens |
| reasoning_end | index in input_ids of the last id of the close tag; -1 opened and never closed; null no reasoning |
| finish_reason, matched_stop | stop or length; what matched, as JSON: an id (a number) or a string |
| engine_capped, clamped, effective_max_new_tokens | where the limit on new tokens came from |
| repetition | share of the output in repeated n-grams (see repetition.py) |
| model, engine_version, weight_version, tokenizer_fingerprint | what made it |
| num_retractions, segments, rids, attempts, latency_seconds | how it was made |
| messages, tools | JSON, as the user gave them; null when switched off |
| logprobs | of the output ids; null unless asked for |
| created_at, generated_at | of the prompt and of the output, UTC |
| kafka_offset | of the outcome, in the partition the shard is of |
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas import ids
from schemas.sequences import Sequence
from services.sink.repetition import repetition

_COLUMNS: dict[str, pa.DataType] = {
    "id": pa.string(),
    "prompt_id": pa.string(),
    "conversation_id": pa.string(),
    "sample_index": pa.int32(),
    "revision": pa.int32(),
    "source": pa.string(),
    "source_ref": pa.string(),
    "turn": pa.int32(),
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.uint8()),
    "prompt_length": pa.int32(),
    "output_length": pa.int32(),
    "reasoning_end": pa.int32(),
    "finish_reason": pa.string(),
    "matched_stop": pa.string(),
    "engine_capped": pa.bool_(),
    "repetition": pa.float32(),
    "model": pa.string(),
    "engine_version": pa.string(),
    "weight_version": pa.string(),
    "num_retractions": pa.int32(),
    "tokenizer_fingerprint": pa.string(),
    "sampling": pa.string(),
    "chat_template_kwargs": pa.string(),
    "effective_max_new_tokens": pa.int32(),
    "clamped": pa.bool_(),
    "segments": pa.list_(pa.int32()),
    "messages": pa.string(),
    "tools": pa.string(),
    "metadata": pa.string(),
    "logprobs": pa.list_(pa.float32()),
    "request_id": pa.string(),
    "rids": pa.list_(pa.string()),
    "attempts": pa.int32(),
    "latency_seconds": pa.float64(),
    "created_at": pa.timestamp("us", tz="UTC"),
    "generated_at": pa.timestamp("us", tz="UTC"),
    "kafka_offset": pa.int64(),
}
SCHEMA = pa.schema(_COLUMNS)
_INT32 = range(-(2**31), 2**31)
_MICROSECONDS = range(-(2**62), 2**62)
_OVERHEAD_BYTES = 1700
"""Of a row in memory, beside its token ids and texts (measured with tracemalloc)."""


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sequence as it waits for its shard. Fields have the names and the units of the columns; `input_ids` and
    `logprobs` are arrays, because a list would take nine times the memory. Every value fits its column."""

    id: str
    prompt_id: str
    conversation_id: str
    sample_index: int
    revision: int
    source: str
    source_ref: str
    turn: int
    input_ids: NDArray[np.int32]
    prompt_length: int
    output_length: int
    reasoning_end: int | None
    finish_reason: str
    matched_stop: str | None
    engine_capped: bool
    model: str
    engine_version: str | None
    weight_version: str | None
    num_retractions: int
    tokenizer_fingerprint: str
    sampling: str
    chat_template_kwargs: str
    effective_max_new_tokens: int
    clamped: bool
    segments: list[int]
    messages: str | None
    tools: str | None
    metadata: str
    logprobs: NDArray[np.float32] | None
    request_id: str
    rids: list[str]
    attempts: int
    latency_seconds: float
    created_at: int
    generated_at: int
    kafka_offset: int

    @property
    def nbytes(self) -> int:
        """About the memory it takes."""
        texts = len(self.messages or "") + len(self.tools or "") + len(self.metadata) + len(self.sampling)
        logprobs = 0 if self.logprobs is None else self.logprobs.nbytes
        return _OVERHEAD_BYTES + self.input_ids.nbytes + texts + logprobs


def row(sequence: Sequence, offset: int) -> Row:
    """The row of `sequence`. Raises ValueError, OverflowError or TypeError for values no column can hold."""
    prompt = sequence.prompt
    length = len(prompt.prompt_ids)
    input_ids = np.empty(length + len(sequence.output_ids), np.int32)
    input_ids[:length] = prompt.prompt_ids
    input_ids[length:] = sequence.output_ids
    made = Row(
        id=prompt.id.hex(),
        prompt_id=ids.prompt_id(prompt.prompt_ids).hex(),
        conversation_id=prompt.conversation_id,
        sample_index=prompt.sample_index,
        revision=prompt.revision,
        source=prompt.source,
        source_ref=_json(prompt.source_ref),
        turn=prompt.turn,
        input_ids=input_ids,
        prompt_length=length,
        output_length=len(sequence.output_ids),
        reasoning_end=sequence.reasoning_end,
        finish_reason=sequence.finish_reason,
        matched_stop=None if sequence.matched_stop is None else _json(sequence.matched_stop),
        engine_capped=sequence.engine_capped,
        model=prompt.model,
        engine_version=sequence.engine_version,
        weight_version=sequence.weight_version,
        num_retractions=sequence.num_retractions,
        tokenizer_fingerprint=prompt.tokenizer_fingerprint,
        sampling=_json({**prompt.sampling, "sampling_seed": prompt.seed}),
        chat_template_kwargs=_json(prompt.chat_template_kwargs),
        effective_max_new_tokens=sequence.effective_max_new_tokens,
        clamped=prompt.clamped,
        segments=sequence.segments,
        messages=prompt.messages,
        tools=prompt.tools,
        metadata=_json(prompt.metadata),
        logprobs=None if sequence.logprobs is None else np.array(sequence.logprobs, np.float32),
        request_id=ids.request_id(prompt.prompt_ids, prompt.model, prompt.sample_index).hex(),
        rids=sequence.rids,
        attempts=sequence.attempts,
        latency_seconds=sequence.latency_seconds,
        created_at=round(prompt.created_at * 1e6),
        generated_at=round(sequence.generated_at * 1e6),
        kafka_offset=offset,
    )
    # Found now it is one refused record; found while the shard is built it would stand in the way of all others.
    counts = (made.attempts, made.num_retractions, made.effective_max_new_tokens, made.reasoning_end or 0)
    numbers = (made.sample_index, made.revision, made.turn, *counts, *made.segments)
    if min(numbers) not in _INT32 or max(numbers) not in _INT32:
        raise OverflowError("a number does not fit 32 bits")
    if made.created_at not in _MICROSECONDS or made.generated_at not in _MICROSECONDS:
        raise OverflowError("a time is no time")
    return made


def table(rows: List[Row]) -> pa.Table:
    """At least one row, as SCHEMA says. Takes about twice the rows' memory while it works."""
    columns = dict(zip(Row.__struct_fields__, zip(*map(msgspec.structs.astuple, rows), strict=True), strict=True))
    prompts, outputs = (np.array(columns[name], np.int64) for name in ("prompt_length", "output_length"))
    offsets = _offsets(prompts + outputs)
    tokens = np.concatenate(columns["input_ids"])
    mask = np.repeat(np.tile(np.array([0, 1], np.uint8), len(rows)), np.stack([prompts, outputs], axis=1).ravel())
    made: dict[str, pa.Array[Any]] = {
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens)),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask)),
        "repetition": pa.array(repetition(tokens[mask == 1], outputs)),
        "logprobs": _optional_lists(columns["logprobs"]),
    }
    made |= {field.name: pa.array(columns[field.name], field.type) for field in SCHEMA if field.name not in made}
    return pa.table(made, SCHEMA)


def _offsets(lengths: NDArray[np.int64]) -> pa.Int32Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())


def _optional_lists(lists: List[NDArray[np.float32] | None]) -> pa.Array[Any]:
    present = [each for each in lists if each is not None]
    lengths = np.array([0 if each is None else len(each) for each in lists], np.int64)
    values = np.concatenate(present) if present else np.empty(0, np.float32)
    absent = pa.array(np.array([each is None for each in lists]))
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values), mask=absent)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
