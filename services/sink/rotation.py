"""When an open shard is closed, and how much may still come in. Knows no clock and no Kafka."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from services.sink.arrivals import Arrival
from services.sink.buffer import Buffer
from services.sink.settings import SinkSettings

_POLL_RECORDS = 500
_REMEMBERED = 1000
"""Records after which a size is forgotten, so that one huge record does not keep the polls small for ever."""


class Rotation:
    """Limits of each shard (rows, bytes, age) and one budget of bytes for all open shards together.

    Room is kept for the largest of the last records, so that a poll overruns the budget only by records larger than
    all of those."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings = settings
        self._sizes = deque([1], maxlen=_REMEMBERED)

    def arrived(self, arrivals: Iterable[Arrival]) -> None:
        """Records that were taken in."""
        self._sizes.extend(arrival.nbytes for arrival in arrivals)

    def room(self, buffers: Mapping[int, Buffer]) -> int:
        """How many records the next poll may bring; 0 when the budget is spent."""
        used = sum(buffer.nbytes for buffer in buffers.values())
        fitting = (self._settings.buffer_bytes - used) // max(self._sizes)
        # A record larger than the whole budget must pass too, alone.
        return max(min(fitting, _POLL_RECORDS, self._settings.max_rows), 0 if used else 1)

    def due(self, buffers: Mapping[int, Buffer], now: float) -> list[int]:
        """The partitions whose shard is to be committed now: those at a limit, then the largest until there is room."""
        due = [partition for partition, buffer in buffers.items() if self._at_limit(buffer, now)]
        rest = {partition: buffer for partition, buffer in buffers.items() if partition not in due and buffer.nbytes}
        while rest and not self.room(rest):
            largest = max(rest, key=lambda partition: rest[partition].nbytes)
            due.append(largest)
            del rest[largest]
        return due

    def _at_limit(self, buffer: Buffer, now: float) -> bool:
        limits = self._settings
        return (
            buffer.kept >= limits.max_rows
            or buffer.nbytes >= limits.max_bytes
            or (buffer.opened is not None and now - buffer.opened >= limits.max_age_seconds)
        )
