"""An export from start to end: survey the rows, shuffle them on disk, write the files, write the card.

    survey   light columns: which rows are taken, how many of each source, how many files that makes
    spill    all columns of the rows taken, into buckets: one for each file
    files    bucket by bucket, sorted in memory and written in the trainer's format
    card     README.md and its charts, last: a directory without one is not finished

Interrupted, the same command goes on where it stopped: the plan keeps what was asked and the state of the dataset that
is exported. Memory holds a row group or a file, 13 bytes for each row that may be taken, whatever the dataset's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa

from services.dataset import hashing, spill, stats
from services.dataset.busy import Busy
from services.dataset.export_plan import COUNTS, SPILL, Plan, tidy
from services.dataset.filters import Filters
from services.dataset.progress import progress
from services.dataset.reader import Shard, View, masked
from services.dataset.selection import EVAL, TRAIN, Selection
from services.dataset.spill import Spilled
from services.dataset.stats import Stats
from services.dataset.vocab import Frequencies
from services.kernel.errors import SettingsError
from services.kernel.overlap import Overlap


class Format(Protocol):
    """How rows become files."""

    @property
    def columns(self) -> Sequence[str]:
        """What `write` needs of a row."""

    def files(self, split: str, number: int, of: int) -> list[str]:
        """The files that part `number` (from 0) of `of` goes to, in the export's directory."""

    def write(self, paths: Sequence[Path], table: pa.Table, max_length: int) -> None:
        """Write the rows of a part to its files."""

    def finish(self, out: Path, files: dict[str, list[str]], frequencies: Frequencies) -> None:
        """All files of each split are there: write what goes with them."""


class Result(msgspec.Struct, kw_only=True):
    """What the card tells."""

    plan: Plan
    stats: Stats
    left_out: dict[str, int]
    left_out_tokens: dict[str, int]
    busy_seconds: float
    files: dict[str, list[str]]
    frequencies: Frequencies


class Export:
    """One export into the directory `out`."""

    def __init__(
        self, view: View, filters: Filters, format: Format, out: Path, *, exclude: Overlap | None, tokens_per_file: int
    ) -> None:
        self._view, self._filters, self._format, self._out = view, filters, format, out
        self._selection = Selection(filters, exclude)
        self._tokens_per_file = tokens_per_file
        self.busy = Busy()

    def run(self, plan: Plan, card: Callable[[Result], None]) -> Result:
        """Do all of it; what is done already is not done again."""
        self._survey()
        spilled = self._spill()
        files, frequencies = self._write(spilled)
        self._format.finish(self._out, files, frequencies)
        result = Result(
            plan=plan,
            stats=spilled.stats,
            left_out=dict(self._selection.left_out) | self._not_seen,
            left_out_tokens=dict(self._selection.left_out_tokens),
            busy_seconds=self.busy.seconds,
            files=files,
            frequencies=frequencies,
        )
        card(result)
        tidy(self._out)
        return result

    def _survey(self) -> None:
        self._view.reset()
        columns = list(dict.fromkeys([*self._selection.survey_columns, *Busy.COLUMNS]))
        for shard in progress(self._view.shards, "surveying"):
            for table in self._view.read(shard, columns):
                self._selection.survey(table)
                self.busy.add(table)
        self._not_seen = {"discarded": self._view.discarded, "of an older revision": self._view.outdated}
        if not self._view.since and (unknown := set(self._filters.sources) - self._selection.sources):
            raise SettingsError(
                f"no row is of source {', '.join(sorted(unknown))}; "
                f"there are: {', '.join(sorted(self._selection.sources)) or 'none'}"
            )
        self._selection.settle()
        self._parts = {split: -(-tokens // self._tokens_per_file) for split, tokens in self._selection.tokens.items()}

    def _spill(self) -> Spilled:
        folder = self._out / SPILL
        folder.mkdir(parents=True, exist_ok=True)
        columns = list(dict.fromkeys([*self._filters.columns, *stats.COLUMNS, *self._format.columns]))
        keep = list(dict.fromkeys(["id", "prompt_length", *self._format.columns]))
        for shard in progress(self._view.shards, "shuffling"):
            done = folder / f"{_stem(shard)}.done"
            if done.exists():
                continue
            for group, table in enumerate(self._view.read(shard, columns)):
                chosen = self._selection.choose(table)
                table, keys, to_eval = masked(table, chosen.keep), chosen.keys[chosen.keep], chosen.eval[chosen.keep]
                if not len(table):
                    continue
                buckets = np.where(
                    to_eval,
                    self._parts[TRAIN] + hashing.bucket(keys, self._parts[EVAL]),
                    hashing.bucket(keys, self._parts[TRAIN]),
                )
                part = Stats()
                part.add(table, self._filters.max_length)
                spill.write(folder / f"{_stem(shard)}-{group}.arrow", table.select(keep), keys, buckets, part)
            done.touch()
        return Spilled(folder)

    def _write(self, spilled: Spilled) -> tuple[dict[str, list[str]], Frequencies]:
        """Every part that is not there yet. The files of all, and how often the training files supervise each token."""
        (self._out / COUNTS).mkdir(exist_ok=True)
        files: dict[str, list[str]] = {TRAIN: [], EVAL: []}
        total = Frequencies()
        for bucket, split, names in progress(list(self._parts_to_write(spilled)), "writing"):
            counted = self._out / COUNTS / f"{bucket}.npy"
            if not (counted.exists() and all((self._out / name).exists() for name in names)):
                table = spilled.bucket(bucket)
                own = Frequencies()
                if split == TRAIN:
                    own.add(table, self._filters.max_length)
                own.save(counted)
                self._write_part([self._out / name for name in names], table)
            total.merge(Frequencies.load(counted))
            files[split] += names
        return files, total

    def _parts_to_write(self, spilled: Spilled) -> Iterator[tuple[int, str, list[str]]]:
        """(bucket, split, names of its files). A bucket into which no row fell is no part."""
        for split, first in ((TRAIN, 0), (EVAL, self._parts[TRAIN])):
            present = [bucket for bucket in range(first, first + self._parts[split]) if bucket in spilled]
            for number, bucket in enumerate(present):
                yield bucket, split, self._format.files(split, number, len(present))

    def _write_part(self, paths: list[Path], table: pa.Table) -> None:
        temporary = [path.with_name(f"{path.name}.part") for path in paths]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._format.write(temporary, table, self._filters.max_length)
        for part, path in zip(temporary, paths, strict=True):
            os.replace(part, path)


def _stem(shard: Shard) -> str:
    return f"{shard.partition:05d}-{shard.start:020d}"
