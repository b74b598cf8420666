"""For how long engines were at work on the rows that were read: what they cost."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_TICK = 10.0


class Busy:
    """The time in which at least one row was being generated, in ticks of 10 seconds: pauses do not count."""

    COLUMNS: ClassVar = ["generated_at", "latency_seconds"]

    def __init__(self) -> None:
        self._changes: dict[int, int] = {}  # {tick: rows that begin in it, less those that ended before it}

    def add(self, table: pa.Table) -> None:
        """Rows, each generated from `latency_seconds` before `generated_at` on."""
        end = np.asarray(pc.cast(table.column("generated_at"), pa.int64()).to_numpy()) / 1e6
        begin = end - np.asarray(table.column("latency_seconds").to_numpy())
        for times, step, shift in ((begin, 1, 0), (end, -1, 1)):
            ticks, counts = np.unique(np.floor(times / _TICK).astype(np.int64) + shift, return_counts=True)
            for tick, count in zip(ticks.tolist(), counts.tolist(), strict=True):
                self._changes[tick] = self._changes.get(tick, 0) + step * count

    @property
    def seconds(self) -> float:
        """All ticks in which a row was in the making."""
        ticks = sorted(self._changes)
        running = np.cumsum([self._changes[tick] for tick in ticks])
        spans = np.diff(np.array([*ticks, ticks[-1]] if ticks else [0]))
        return float(spans[running > 0].sum() * _TICK) if ticks else 0.0
