"""The open shard of a partition: what came since the tail, told apart, waiting to be committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from schemas.sequences import FailureReason
from services.kernel.errors import Fatal
from services.kernel.seen import SeenIds, pack
from services.sink.arrivals import Arrival, Refusal
from services.sink.rows import Row


class Seen:
    """The ids a partition's committed shards hold. `failures` keeps the superseded ones too."""

    def __init__(self) -> None:
        self.rows = SeenIds()
        self.failures = SeenIds()

    @property
    def nbytes(self) -> int:
        """Memory of the index."""
        return self.rows.nbytes + self.failures.nbytes


class Buffer:
    """Covers the offsets [start, end).

    After a row, everything with its id is a duplicate. After a failure only another failure is: a row is still kept,
    and its id listed as superseded, so that readers count it once. What an open shard holds counts as seen only as
    long as the buffer lives: thrown away, it is forgotten."""

    def __init__(self, start: int, last_id: bytes | None) -> None:
        self.start = self.end = start
        self.last_id = last_id
        self.rows: list[Row] = []
        self.failures: list[tuple[bytes, FailureReason]] = []
        self.letters: list[tuple[bytes, bytes]] = []  # (record id, dead letter)
        self.superseded: list[bytes] = []
        self.sources: Counter[str] = Counter()  # records of which this is the first outcome
        self.duplicates = 0
        self.gap = 0
        self.nbytes = 0
        self.opened: float | None = None  # when the first record or gap came, monotonic
        self._row_ids: set[bytes] = set()
        self._failure_ids: set[bytes] = set()

    @property
    def kept(self) -> int:
        """Rows and failures."""
        return len(self.rows) + len(self.failures)

    def skip(self, offset: int, now: float) -> None:
        """The records before `offset` are gone from the topic."""
        self.gap += offset - self.end
        self.end, self.last_id = offset, None
        self.opened = self.opened or now

    def add(self, arrivals: Sequence[Arrival], seen: Seen, now: float) -> None:
        """Take in the records that follow. Raises Fatal when they do not follow."""
        ids = pack([arrival.id for arrival in arrivals])
        of_rows, of_failures = seen.rows.contains(ids).tolist(), seen.failures.contains(ids).tolist()
        for arrival, row_seen, failure_seen in zip(arrivals, of_rows, of_failures, strict=True):
            if arrival.offset != self.end:
                raise Fatal(f"offset {arrival.offset} was delivered, {self.end} must follow: a gap in the topic")
            self.end, self.last_id = arrival.offset + 1, arrival.id
            self._sort(
                arrival,
                row_seen=row_seen or arrival.id in self._row_ids,
                failure_seen=failure_seen or arrival.id in self._failure_ids,
            )
        self.opened = self.opened or now

    def _sort(self, arrival: Arrival, *, row_seen: bool, failure_seen: bool) -> None:
        content = arrival.content
        if row_seen or (failure_seen and isinstance(content, Refusal)):
            self.duplicates += 1
            if not row_seen and isinstance(content, Refusal):
                # It may have been replayed, and have failed again: then people want to know. The topic is a set.
                self.letters.append((arrival.id, content.letter))
                self.nbytes += arrival.nbytes
            return
        self.nbytes += arrival.nbytes
        if isinstance(content, Refusal):
            self.failures.append((arrival.id, content.reason))
            self.letters.append((arrival.id, content.letter))
            self._failure_ids.add(arrival.id)
            if content.source is not None:
                self.sources[content.source] += 1
            return
        self.rows.append(content)
        self._row_ids.add(arrival.id)
        if failure_seen:
            self.superseded.append(arrival.id)
        else:
            self.sources[content.source] += 1
