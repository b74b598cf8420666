"""What an export holds, counted so that counts of its parts can be added up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from services.dataset.filters import numbers

COLUMNS = [
    "source", "finish_reason", "sampling", "model", "engine_version", "weight_version", "tokenizer_fingerprint",
    "chat_template_kwargs", "prompt_length", "output_length", "clamped",
]  # fmt: skip
_PER_OCTAVE = 4
_BINS = 24 * _PER_OCTAVE
EDGES = np.unique(np.round(2 ** (np.arange(_BINS + 1) / _PER_OCTAVE)).astype(np.int64))
"""Of the histograms of lengths: four bins for each doubling, up to 16 M tokens."""


class SourceStats(msgspec.Struct):
    """Of one source: rows, and tokens as exported."""

    rows: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Stats(msgspec.Struct):
    """Of rows that are exported. `cut` rows were longer than the maximum; `lost_tokens` of their outputs are gone."""

    rows: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cut: int = 0
    lost_tokens: int = 0
    sources: dict[str, SourceStats] = {}
    counts: dict[str, dict[str, int]] = {}
    """{column: {value: rows}}."""
    prompt_lengths: list[int] = msgspec.field(default_factory=lambda: [0] * len(EDGES))
    output_lengths: list[int] = msgspec.field(default_factory=lambda: [0] * len(EDGES))

    def add(self, table: pa.Table, max_length: int) -> None:
        """Count rows of which each is cut to `max_length`."""
        prompt, output = numbers(table, "prompt_length"), numbers(table, "output_length")
        kept = np.minimum(output, max_length - prompt)
        self.rows += len(table)
        self.prompt_tokens += int(prompt.sum())
        self.output_tokens += int(kept.sum())
        self.cut += int((kept < output).sum())
        self.lost_tokens += int((output - kept).sum())
        for source, own_prompt, own_output in zip(_texts(table, "source"), prompt.tolist(), kept.tolist(), strict=True):
            stats = self.sources.setdefault(source, SourceStats())
            stats.rows += 1
            stats.prompt_tokens += own_prompt
            stats.output_tokens += own_output
        for name in COLUMNS:
            if name == "sampling":
                _count(self.counts.setdefault(name, {}), map(_asked, _texts(table, name), _values(table, "clamped")))
            elif name not in ("prompt_length", "output_length", "clamped", "source"):
                _count(self.counts.setdefault(name, {}), _texts(table, name))
        for lengths, histogram in ((prompt, self.prompt_lengths), (kept, self.output_lengths)):
            bins = np.bincount(np.searchsorted(EDGES, lengths, "right") - 1, minlength=len(EDGES))
            histogram[:] = (np.array(histogram) + bins[: len(EDGES)]).tolist()

    def merge(self, other: Stats) -> None:
        """Add what another part holds."""
        for name in ("rows", "prompt_tokens", "output_tokens", "cut", "lost_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, stats in other.sources.items():
            mine = self.sources.setdefault(source, SourceStats())
            for name in SourceStats.__struct_fields__:
                setattr(mine, name, getattr(mine, name) + getattr(stats, name))
        for column, counts in other.counts.items():
            mine_of = self.counts.setdefault(column, {})
            for value, count in counts.items():
                mine_of[value] = mine_of.get(value, 0) + count
        for histogram, more in (
            (self.prompt_lengths, other.prompt_lengths),
            (self.output_lengths, other.output_lengths),
        ):
            histogram[:] = [a + b for a, b in zip(histogram, more, strict=True)]


def _asked(sampling: str, clamped: bool) -> str:
    """Without what differs from row to row: the seed, and a limit that only the prompt's length set."""
    values = msgspec.json.decode(sampling)
    values.pop("sampling_seed", None)
    if clamped:
        values["max_new_tokens"] = "what the context has left"
    return msgspec.json.encode(values, order="sorted").decode()


def _count(counts: dict[str, int], values: Iterable[str]) -> None:
    for value in values:
        counts[value] = counts.get(value, 0) + 1


def _values(table: pa.Table, name: str) -> list[Any]:
    return list(table.column(name).to_pylist())


def _texts(table: pa.Table, name: str) -> list[str]:
    return ["unknown" if value is None else str(value) for value in _values(table, name)]
