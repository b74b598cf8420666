"""Goes through a dataset's files: names, chains, footers, ids. Rows are looked at in rowchecks.py."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas import ids
from schemas.control import Dataset
from schemas.sequences import FailureReason
from services.kernel.errors import Retry, TokenhaulError
from services.kernel.seen import SeenIds, pack
from services.kernel.store import Store
from services.sink import drift, exclusions, rowchecks
from services.sink.chain import SHARD, folder, join, shard_name, starts
from services.sink.drift import Drift
from services.sink.exclusions import Exclusions
from services.sink.parquet import TOKEN_COLUMNS, DamagedShard, Footer, check_seal, damage_named, open_shard
from services.sink.report import Report
from services.sink.rerender import Rerender
from services.sink.rows import SCHEMA


class Partition:
    """What the shards of one partition said so far."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tail: int | None = 0  # None: the shard before cannot be read
        self.rows = SeenIds()
        self.failures: dict[str, str] = {}  # {id: reason} of those no row superseded


class Audit:
    """One walk over a dataset. What is found goes into the report; nothing is raised."""

    def __init__(
        self, store: Store, folder: str, dataset: Dataset, rerender: Rerender | None = None, deep: Drift | None = None
    ) -> None:
        self._store, self._folder = store, folder
        self._dataset, self._rerender = dataset, rerender
        self.report = Report(
            directory=store.name(folder),
            dataset=dataset.name,
            model=dataset.model,
            partitions=dataset.partitions,
            drift=deep,
        )

    def partitions(self) -> Iterator[Partition]:
        """Look at everything, a partition at a time; those without shards are there as well."""
        self._exclusions()
        known = {folder(number): number for number in range(self._dataset.partitions)}
        present = self._names("", known.__contains__)
        for name, number in known.items():
            partition = Partition(number)
            for start in starts(self._names(name, SHARD.fullmatch)) if name in present else ():
                self._shard(partition, start, f"{name}/{shard_name(start)}")
            _count(self.report.failures, partition.failures.values())
            self.report.rerendered = self._rerender.compared if self._rerender else None
            yield partition

    def _exclusions(self) -> None:
        """What was discarded: those rows are checked like any other, and counted."""
        try:
            self._excluded = exclusions.load(self._store, self._folder)
            self.report.exclusions = self._excluded.lists
        except TokenhaulError as error:
            self._excluded = Exclusions()
            self.report.problem(exclusions.FOLDER, None, str(error))

    def _names(self, place: str, belongs: Callable[[str], object]) -> list[str]:
        """What belongs into `place`, sorted. Names with a . or _ in front are not data: no reader looks at them."""
        names = [name for name in self._store.list(join(self._folder, place)) if name[0] not in "._"]
        for name in names:
            if not belongs(name):
                self.report.problem(join(place, name), None, "does not belong to the dataset")
        return [name for name in names if belongs(name)]

    def _shard(self, partition: Partition, start: int, file: str) -> None:
        self.report.shards += 1
        try:
            with self._store.open(join(self._folder, file)) as source:
                data = source.read()  # in one request: all of it is looked at
            self.report.bytes += len(data)
            shard, footer = open_shard(io.BytesIO(data), "the file")
            check_seal(data, "the file")
            self._footer(partition, start, file, shard, footer)
            with damage_named("the file"):
                self._rows(partition, file, shard, footer)
        except (DamagedShard, Retry) as error:
            partition.tail = None
            self.report.problem(file, None, str(error))

    def _footer(self, partition: Partition, start: int, file: str, shard: pq.ParquetFile, footer: Footer) -> None:
        def wrong(what: str) -> None:
            self.report.problem(file, None, what)

        expected = {
            "dataset": self._dataset.name,
            "model": self._dataset.model,
            "partitions": self._dataset.partitions,
            "partition": partition.number,
            "start": start,
            "rows": shard.metadata.num_rows,
        }
        for field, value in expected.items():
            if getattr(footer, field) != value:
                wrong(f"the footer says {field} {getattr(footer, field)!r}, it must be {value!r}")
        if partition.tail is not None and start > partition.tail:
            wrong(f"a hole before it: offsets [{partition.tail}, {start}) are in no shard")
        if partition.tail is not None and start < partition.tail:
            wrong(f"overlaps the shard before it, which ends at {partition.tail}")
        partition.tail = footer.end
        parts = (footer.rows, footer.duplicates, len(footer.failures), footer.gap)
        if footer.end <= footer.start or min(parts) < 0 or footer.end - footer.start != sum(parts):
            counts = "{} rows, {} duplicates, {} failures and a gap of {}".format(*parts)
            wrong(f"covers offsets [{footer.start}, {footer.end}), but lists {counts}")
        self.report.duplicates += footer.duplicates
        self.report.superseded += len(footer.superseded)
        self.report.gap += footer.gap
        for id, reason in footer.failures:
            if problem := self._failure(partition, id, reason):
                wrong(f"failure {id} ({reason}) {problem}")
            else:
                partition.failures[id] = reason

    def _failure(self, partition: Partition, id: str, reason: str) -> str | None:
        if not rowchecks.ID.fullmatch(id):
            return "has no id of 32 hex digits"
        if id in partition.failures:
            return "is listed before"
        if bytes.fromhex(id) in partition.rows:
            return "is of a record that has a row"
        # A record nobody can read may have an id made of its place.
        home = ids.partition(bytes.fromhex(id), self._dataset.partitions)
        if reason != FailureReason.UNDECODABLE and home != partition.number:
            return f"belongs to partition {home}"
        return None

    def _rows(self, partition: Partition, file: str, shard: pq.ParquetFile, footer: Footer) -> None:
        if not shard.schema_arrow.equals(SCHEMA):
            self.report.problem(file, None, f"its columns are not those of schema {footer.schema}")
            return
        superseded = set(footer.superseded)
        first, offset, last_id = 0, footer.start - 1, None
        for group in range(shard.num_row_groups):
            chunks = (shard.metadata.row_group(group).column(i) for i in range(shard.metadata.num_columns))
            self.report.token_bytes += sum(
                chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in TOKEN_COLUMNS
            )
            table, rows = self._readable(file, first, shard.read_row_group(group))  # all columns, for their checksums
            first += shard.metadata.row_group(group).num_rows
            if not len(rows):
                continue
            for row, what in rowchecks.content(table, self._dataset, partition.number):
                self.report.problem(file, rows[row], what)
            for row, what in self._rerender.check(table) if self._rerender else ():
                self.report.problem(file, rows[row], what)
            if self._rerender and self.report.drift:
                drift.measure(table, self._rerender.tokenizer, self.report.drift)
            offsets = np.concatenate([[offset], rowchecks.numbers(table, "kafka_offset")])
            for row in np.flatnonzero((np.diff(offsets) <= 0) | (offsets[1:] >= footer.end)).tolist():
                self.report.problem(file, rows[row], f"kafka_offset {offsets[row + 1]} is out of order or of the shard")
            offset, last_id = int(offsets[-1]), table.column("id")[-1].as_py()
            self._ids(partition, file, rows, table, superseded)
            self._totals(table)
        for id in sorted(superseded):
            self.report.problem(file, None, f"superseded {id} is not a row of it that stands for a failure")
        if offset == footer.end - 1 and last_id != footer.last_id:
            self.report.problem(file, None, f"the footer's last_id is {footer.last_id}, the last row is {last_id}")

    def _readable(self, file: str, first: int, table: pa.Table) -> tuple[pa.Table, list[int]]:
        """The rows of a group that can be looked at further, and their numbers in the file."""
        rows = np.arange(first, first + table.num_rows)
        for check in (rowchecks.missing, rowchecks.lengths):
            found = list(check(table))
            for row, what in found:
                self.report.problem(file, int(rows[row]), what)
            keep = np.setdiff1d(np.arange(len(rows)), [row for row, _ in found])
            table, rows = table.take(pa.array(keep)), rows[keep]
        return table, rows.tolist()

    def _ids(self, partition: Partition, file: str, rows: list[int], table: pa.Table, superseded: set[str]) -> None:
        """Every id once, and in place of a failure only where `superseded` says so: it is emptied of what is found."""
        names = rowchecks.values(table, "id")
        packed = pack([bytes.fromhex(id) for id in names])
        self.report.discarded += int(self._excluded.ids.contains(packed).sum())
        again = partition.rows.contains(packed)
        again[np.setdiff1d(np.arange(len(rows)), np.unique(packed, axis=0, return_index=True)[1])] = True
        for row in np.flatnonzero(again).tolist():
            self.report.problem(file, rows[row], f"id {names[row]} comes a second time")
        partition.rows.add(packed)
        for row, id in enumerate(names) if partition.failures else ():
            if partition.failures.pop(id, None) is not None:
                if id not in superseded:
                    self.report.problem(file, rows[row], f"id {id} is a failure too, and not listed as superseded")
                superseded.discard(id)

    def _totals(self, table: pa.Table) -> None:
        self.report.rows += table.num_rows
        self.report.prompt_tokens += int(rowchecks.numbers(table, "prompt_length").sum())
        self.report.output_tokens += int(rowchecks.numbers(table, "output_length").sum())
        _count(self.report.finish_reasons, rowchecks.values(table, "finish_reason"))


def _count(counts: dict[str, int], values: Iterable[str]) -> None:
    for value in values:
        counts[value] = counts.get(value, 0) + 1
