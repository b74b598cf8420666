"""What a row must be to be taken, looked at a table at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.sequences import NEVER_CLOSED
from services.dataset.where import Where

COLUMNS = [
    "id", "conversation_id", "prompt_id", "source", "prompt_length", "output_length", "reasoning_end", "finish_reason",
    "matched_stop", "repetition",
]  # fmt: skip
"""What a choice is made by, beside what `where` names."""


_NO_LIMIT = 2**62
Wrong = Iterator[tuple[str, NDArray[np.bool_]]]
"""Reasons to leave rows out, each with the rows it holds for: shape (rows,)."""


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What a row must be. Lengths are in tokens, shares between 0 and 1."""

    finish_reasons: list[str] = []
    reasoning_closed: bool = False
    sources: list[str] = []
    min_output: int = 1
    max_output: int | None = None
    max_prompt: int | None = None
    max_repetition: float | None = None
    keep_empty: bool = False
    where: list[Where] = []
    sample: float = 1.0
    caps: dict[str, int] = {}
    ratios: dict[str, float] = {}
    seed: int = 0
    eval_share: float = 0.0
    max_length: int
    drop_too_long: bool = False
    min_supervised: int = 1

    @property
    def columns(self) -> list[str]:
        """What `wrong` must be given, and what else a choice is made by."""
        return list(dict.fromkeys([*COLUMNS, *(column for each in self.where for column in each.columns)]))

    def wrong(self, table: pa.Table) -> Wrong:
        """What rows are not taken, and why."""
        yield from self._unlike(table)
        yield from self._too_short_or_long(table)

    def _unlike(self, table: pa.Table) -> Wrong:
        """By what a row is."""
        if self.sources:
            yield "source", ~np.isin(strings(table, "source"), self.sources)
        for condition in self.where:
            yield f"not: {condition.text}", ~condition.matches(table)
        if self.finish_reasons:
            yield "finish reason", ~np.isin(strings(table, "finish_reason"), self.finish_reasons)
        if self.reasoning_closed:
            yield "reasoning never closed", numbers(table, "reasoning_end", missing=0) == NEVER_CLOSED
        if self.max_repetition is not None:
            yield "repetition", np.asarray(table.column("repetition").to_numpy()) > self.max_repetition

    def _too_short_or_long(self, table: pa.Table) -> Wrong:
        """By its lengths."""
        prompt, output = numbers(table, "prompt_length"), numbers(table, "output_length")
        if not self.keep_empty:
            stopped = strings(table, "finish_reason") == "stop"
            by_id = np.array([(text or "").lstrip("-").isdigit() for text in strings(table, "matched_stop")], np.bool_)
            yield "empty output", (output == 1) & stopped & by_id
        yield "output length", (output < self.min_output) | (output > (self.max_output or _NO_LIMIT))
        yield "prompt length", prompt > (self.max_prompt or _NO_LIMIT)
        if self.drop_too_long:
            yield "longer than --max-length", prompt + output > self.max_length
        supervised = np.minimum(prompt + output, self.max_length) - prompt
        yield "too few supervised tokens within --max-length", supervised < self.min_supervised


def numbers(table: pa.Table, name: str, missing: int | None = None) -> NDArray[np.int64]:
    """A column of integers; null is `missing`."""
    column: Any = table.column(name)
    if missing is not None:
        column = column.fill_null(missing)
    return np.asarray(column.to_numpy(), np.int64)


def strings(table: pa.Table, name: str) -> NDArray[np.object_]:
    return np.array(table.column(name).to_pylist(), object)
