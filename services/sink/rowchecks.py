"""What must hold for rows, looked at a row group at a time and a column at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas import ids
from schemas.control import Dataset
from schemas.sequences import NEVER_CLOSED

_MATCHED = msgspec.json.Decoder(int | str)
_MAY_BE_NULL = {"reasoning_end", "matched_stop", "logprobs", "messages", "tools", "engine_version", "weight_version"}
Found = Iterator[tuple[int, str]]
"""(row in the group, what is wrong with it)."""

ID = re.compile(r"[0-9a-f]{32}")
"""A record id in text."""


def missing(table: pa.Table) -> Found:
    """Values that must be there. Rows it finds cannot be looked at further."""
    for name in table.column_names:
        if name not in _MAY_BE_NULL and table.column(name).null_count:
            for row, value in enumerate(values(table, name)):
                if value is None:
                    yield row, f"{name} is null"
    for row, id in enumerate(values(table, "id")):
        if id is not None and not ID.fullmatch(id):
            yield row, f"id {id!r} is not 32 hex digits"


def lengths(table: pa.Table) -> Found:
    """How many ids there are. Rows it finds cannot be looked at further."""
    prompt, output = numbers(table, "prompt_length"), numbers(table, "output_length")
    tokens, mask = list_lengths(table, "input_ids"), list_lengths(table, "loss_mask")
    for row in np.flatnonzero((prompt < 1) | (output < 1) | (prompt + output != tokens)).tolist():
        yield row, f"prompt_length {prompt[row]} + output_length {output[row]} != {tokens[row]} input_ids"
    for row in np.flatnonzero(mask != tokens).tolist():
        yield row, f"loss_mask has {mask[row]} entries for {tokens[row]} input_ids"


def content(table: pa.Table, dataset: Dataset, partition: int) -> Found:
    """Everything else, on rows that passed `missing` and `lengths`."""
    yield from _tokens(table)
    yield from _ending(table)
    yield from _parts(table)
    for row, model in enumerate(values(table, "model")):
        if model != dataset.model:
            yield row, f"model {model!r} in a dataset of {dataset.model!r}"
    for row, id in enumerate(values(table, "id")):
        if (home := ids.partition(bytes.fromhex(id), dataset.partitions)) != partition:
            yield row, f"id {id} belongs to partition {home} of {dataset.partitions}"


def values(table: pa.Table, name: str) -> list[Any]:
    """A column as Python objects."""
    return list(table.column(name).to_pylist())


def numbers(table: pa.Table, name: str) -> NDArray[np.int64]:
    """A column of integers without nulls."""
    return np.asarray(table.column(name).to_numpy(), np.int64)


def list_lengths(table: pa.Table, name: str) -> NDArray[np.int64]:
    """Of a column of lists: shape (rows,); -1 for null."""
    return np.asarray(pc.fill_null(pc.list_value_length(table.column(name)), -1).to_numpy(), np.int64)


def elements(table: pa.Table, name: str) -> NDArray[Any]:
    """All elements of a column of lists, one after the other."""
    return np.asarray(pc.list_flatten(table.column(name)).to_numpy())


def _tokens(table: pa.Table) -> Found:
    """The ids and their mask."""
    prompt, total = numbers(table, "prompt_length"), list_lengths(table, "input_ids")
    tokens, mask = elements(table, "input_ids"), elements(table, "loss_mask")
    row_of = np.repeat(np.arange(len(total)), total)
    starts = np.cumsum(total) - total
    place = np.arange(len(tokens)) - np.repeat(starts, total)
    wrong = np.flatnonzero(mask != (place >= np.repeat(prompt, total)))
    rows, firsts = np.unique(row_of[wrong], return_index=True)
    for row, at in zip(rows.tolist(), place[wrong][firsts].tolist(), strict=True):
        yield row, f"loss_mask is not {prompt[row]} zeros, then ones: wrong from index {at} on"
    for row in np.unique(row_of[tokens < 0]).tolist():
        yield row, "input_ids holds a negative id"
    expected = values(table, "prompt_id")
    for row, (start, length) in enumerate(zip(starts.tolist(), prompt.tolist(), strict=True)):
        if ids.prompt_id(tokens[start : start + length].tolist()).hex() != expected[row]:
            yield row, "the prompt's ids are not those prompt_id was made of"


def _ending(table: pa.Table) -> Found:
    """Why and where the output ends, and where its reasoning does."""
    prompt, total = numbers(table, "prompt_length").tolist(), list_lengths(table, "input_ids")
    last = elements(table, "input_ids")[np.cumsum(total) - 1].tolist()
    columns = zip(*(values(table, name) for name in ("finish_reason", "matched_stop", "reasoning_end")), strict=True)
    for row, (reason, matched, end) in enumerate(columns):
        if reason not in ("stop", "length"):
            yield row, f"finish_reason {reason!r} is neither stop nor length"
        try:
            stop = None if matched is None else _MATCHED.decode(matched)
        except msgspec.DecodeError:
            yield row, f"matched_stop {matched!r} is neither an id nor a string"
            continue
        if reason == "stop" and isinstance(stop, int) and last[row] != stop:
            yield row, f"stopped at id {stop}, but ends with {last[row]}"
        if end is not None and end != NEVER_CLOSED and not prompt[row] <= end < total[row]:
            yield row, f"reasoning_end {end} is not in the output, which is [{prompt[row]}, {total[row]})"


def _parts(table: pa.Table) -> Found:
    """What comes along with the output: one for each segment, one for each id."""
    output = numbers(table, "output_length").tolist()
    for row, segments in enumerate(values(table, "segments")):
        if sum(segments) != output[row]:
            yield row, f"segments add up to {sum(segments)}, output_length is {output[row]}"
    for row, count in enumerate(list_lengths(table, "logprobs").tolist()):
        if count not in (-1, output[row]):
            yield row, f"{count} logprobs for {output[row]} output ids"
