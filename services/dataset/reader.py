"""A dataset as its readers see it: every row once, of the highest revision, without what was discarded.

    view = View(place.find("/data/qwen3"))
    for shard in view.shards:
        for table in view.read(shard, ["input_ids", "prompt_length"]):   # one row group at a time
            ...

Rows come in the order of the chains. What is asked for is read and nothing else; memory holds one row group, the
exclusions (20 bytes an id) and the requests that were asked again (20 bytes each). A failure that a later row
superseded is no row, so no row is ever seen twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from services.dataset import snapshot as snapshots
from services.dataset.place import Place
from services.dataset.revisions import Revisions, unhex
from services.dataset.snapshot import Snapshot
from services.kernel.errors import Fatal, SettingsError
from services.sink import exclusions
from services.sink.chain import folder, shard_name, starts
from services.sink.exclusions import Exclusions
from services.sink.parquet import Footer, damage_named, open_shard


class Shard(msgspec.Struct, frozen=True):
    """A shard by its place in the chains."""

    partition: int
    start: int

    @property
    def file(self) -> str:
        """Its name in the dataset's directory."""
        return f"{folder(self.partition)}/{shard_name(self.start)}"


class View:
    """The rows up to a snapshot (default: up to now), or those that came after the snapshot `since`.

    Raises SettingsError for a `since` that is not before the snapshot, Fatal for a chain that is not whole, Retry when
    the store does not answer."""

    def __init__(self, place: Place, snapshot: Snapshot | None = None, since: Snapshot | None = None) -> None:
        self.place = place
        self.snapshot = snapshot or snapshots.now(place)
        self.since = since
        if since and any(a > b for a, b in zip(since.tails, self.snapshot.tails, strict=True)):
            raise SettingsError(
                f"nothing came after snapshot {since.name!r}: {self.snapshot.name!r} was taken before it"
            )
        self.discarded = self.outdated = 0  # rows that were left out, by why, since `reset`

    @cached_property
    def shards(self) -> list[Shard]:
        """All that may hold rows of this view, partition by partition, in the order of the chain."""
        since = self.since.tails if self.since else [0] * self.place.dataset.partitions
        return [shard for shard in self._whole if shard.start >= since[shard.partition]]

    @cached_property
    def exclusions(self) -> Exclusions:
        """What was discarded when the snapshot was taken."""
        return exclusions.load(self.place.store, self.place.folder, self.snapshot.exclusions)

    @cached_property
    def revisions(self) -> Revisions:
        """Which requests were asked again. Reads two columns of the row groups with a revision above 0."""
        ids, numbers = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int32)]
        for shard in self._whole:
            with self._opened(shard) as (file, _):
                for group in range(file.num_row_groups):
                    if _may_exceed_zero(file.metadata.row_group(group)):
                        table = file.read_row_group(group, columns=["request_id", "revision"])
                        revision = table.column("revision").to_numpy()
                        again = revision > 0
                        ids.append(unhex(table.column("request_id"))[again])
                        numbers.append(revision[again])
        return Revisions(np.concatenate(ids), np.concatenate(numbers))

    def reset(self) -> None:
        """Begin to count anew."""
        self.discarded = self.outdated = 0

    def read(
        self, shard: Shard, columns: Sequence[str], *, discarded: bool = False, only_group: int | None = None
    ) -> Iterator[pa.Table]:
        """`columns` of the shard's rows, a row group at a time; with `discarded`, of those that were discarded."""
        wanted = list(dict.fromkeys([*columns, "id", "request_id", "revision"]))
        revisions, excluded = self.revisions, self.exclusions.ids
        with self._opened(shard) as (file, _), damage_named(self._name(shard)):
            for group in range(file.num_row_groups) if only_group is None else [only_group]:
                table = file.read_row_group(group, columns=wanted)
                outdated = revisions.outdated(table.column("request_id"), table.column("revision").to_numpy())
                out = excluded.contains(unhex(table.column("id"))) if len(excluded) else np.zeros(len(table), np.bool_)
                self.outdated += int(outdated.sum())
                self.discarded += int((out & ~outdated).sum())
                yield masked(table.select(list(columns)), (out if discarded else ~out) & ~outdated)

    def rows(self, columns: Sequence[str], *, discarded: bool = False) -> Iterator[pa.Table]:
        """The same, over all shards."""
        for shard in self.shards:
            yield from self.read(shard, columns, discarded=discarded)

    def footers(self, shards: Iterable[Shard] | None = None) -> Iterator[tuple[Shard, Footer]]:
        """What each shard says of itself."""
        for shard in self.shards if shards is None else shards:
            with self._opened(shard) as (_, footer):
                yield shard, footer

    @cached_property
    def _whole(self) -> list[Shard]:
        """Every shard up to the snapshot, also those before `since`: they tell which revisions there are."""
        found: list[Shard] = []
        for partition, tail in enumerate(self.snapshot.tails):
            all_ = starts(self.place.store.list(self.place.key(folder(partition))))
            if all_ and all_[0]:
                raise Fatal(
                    f"{self.place.name}: a hole in partition {partition}, offsets [0, {all_[0]}) are in no shard: "
                    "`tokenhaul verify` tells more"
                )
            found += [Shard(partition, start) for start in all_ if start < tail]
            if tail and tail not in all_ and (not all_ or all_[-1] >= tail):
                raise Fatal(f"{self.place.name}: no shard of partition {partition} begins or ends at {tail}")
        return found

    def _name(self, shard: Shard) -> str:
        return self.place.store.name(self.place.key(shard.file))

    def _opened(self, shard: Shard) -> _Opened:
        return _Opened(self.place, shard, self._name(shard), self._end(shard))

    def _end(self, shard: Shard) -> int:
        """Where the shard must end: where the next one of its chain begins."""
        return self._ends[shard]

    @cached_property
    def _ends(self) -> dict[Shard, int]:
        ends = {}
        for shard, after in zip(self._whole, [*self._whole[1:], None], strict=True):
            same = after is not None and after.partition == shard.partition
            ends[shard] = after.start if after and same else self.snapshot.tails[shard.partition]
        return ends


class _Opened:
    """A shard while it is read, its place in the chain checked."""

    def __init__(self, place: Place, shard: Shard, name: str, end: int) -> None:
        self._file = place.store.open(place.key(shard.file))
        self._shard, self._name, self._end = shard, name, end

    def __enter__(self) -> tuple[pq.ParquetFile, Footer]:
        try:
            file, footer = open_shard(self._file, self._name)
        except BaseException:
            self._file.close()
            raise
        if (footer.start, footer.end) != (self._shard.start, self._end):
            self._file.close()
            raise Fatal(
                f"{self._name} covers [{footer.start}, {footer.end}), but its place in the chain is "
                f"[{self._shard.start}, {self._end}): `tokenhaul verify` tells more"
            )
        return file, footer

    def __exit__(self, *error: object) -> None:
        self._file.close()


def masked(table: pa.Table, keep: NDArray[np.bool_]) -> pa.Table:
    """The rows for which `keep` (shape (rows,)) is true."""
    return table if keep.all() else table.filter(pa.array(keep))


def _may_exceed_zero(group: pq.RowGroupMetaData) -> bool:
    """Whether a row group may hold a revision above 0, by its statistics."""
    for column in range(group.num_columns):
        if (chunk := group.column(column)).path_in_schema == "revision":
            statistics = chunk.statistics
            return not (statistics and statistics.has_min_max and statistics.max == 0)
    return True
