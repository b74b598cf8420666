"""What of a partition is done, when work finishes out of order. Pure.

A tracker holds two things: `high`, the offset after the last one delivered, and the pending offsets: delivered, not
done. Everything below `high` that is not pending is done; everything from `high` on is new. The watermark, below which
all is done, is the first pending offset, or `high` when none is pending.

Committed to Kafka are the watermark (the offset) and the rest of that state (the metadata string), so that whoever
takes the partition next skips what is done beyond the watermark: a finished generation is not paid for again because a
slow one stands before it. Kafka keeps at most 4096 bytes of metadata. While work finishes the string only shrinks (one
gap is never longer than the two it replaces), so it is enough to look before an offset is taken in: `room_for`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

METADATA_BYTES = 4096
_VERSION = "1:"
_PACKED_BYTES = (METADATA_BYTES - len(_VERSION)) // 4 * 3
_SPAN_BYTES = 10  # the longest varint of an int64


class Tracker:
    """The state of one partition. Offsets are delivered in ascending order, with holes where markers are."""

    def __init__(self, start: int) -> None:
        self.high = start
        self._pending: OrderedDict[int, bool] = OrderedDict()  # offset: is it being worked on here; ascending
        self._packed_bound = _SPAN_BYTES

    @property
    def watermark(self) -> int:
        """All offsets below are done."""
        return next(iter(self._pending), self.high)

    @property
    def outstanding(self) -> int:
        """How many delivered offsets are not done."""
        return len(self._pending)

    def is_open(self, offset: int) -> bool:
        """Whether `offset` was delivered and is not done."""
        return offset in self._pending

    def room_for(self, offset: int) -> bool:
        """Whether `offset` can be taken in without the metadata ever outgrowing Kafka's limit."""
        if offset < self.high or not self._pending:
            return True
        gap = _varint_bytes(offset - next(reversed(self._pending)))
        if self._packed_bound + gap > _PACKED_BYTES:
            self._packed_bound = _SPAN_BYTES + sum(_varint_bytes(b - a) for a, b in pairwise(self._pending))
        return self._packed_bound + gap <= _PACKED_BYTES

    def take(self, offsets: Iterable[int]) -> tuple[list[int], int | None]:
        """Of `offsets`, delivered in this order: those to be worked on now, and where the first one stands for which
        there is no room. From there on nothing was taken: it must be delivered again."""
        taken: list[int] = []
        for offset in offsets:
            if not self.room_for(offset):
                return taken, offset
            if self.deliver(offset):
                taken.append(offset)
        return taken, None

    def deliver(self, offset: int) -> bool:
        """Take in a delivered offset. False: it is done or being worked on already, leave it alone."""
        if offset < self.high:
            if self._pending.get(offset, True):
                return False
        elif self._pending:
            self._packed_bound += _varint_bytes(offset - next(reversed(self._pending)))
        else:
            self._packed_bound = _SPAN_BYTES
        self._pending[offset] = True
        self.high = max(self.high, offset + 1)
        return True

    def done(self, offset: int) -> None:
        """The outcome of `offset` is safe on its topic."""
        self._pending.pop(offset, None)

    def passed(self, position: int) -> None:
        """All records below `position` were delivered: what else lies there are transaction markers."""
        self.high = max(self.high, position)

    def metadata(self) -> str:
        """What is done beyond the watermark, packed; empty when nothing is pending."""
        if not self._pending:
            return ""
        numbers = [self.high - self.watermark, *(after - before for before, after in pairwise(self._pending))]
        return _VERSION + b64encode(b"".join(map(_varint, numbers))).decode()

    @classmethod
    def restore(cls, committed: int, metadata: str) -> Tracker:
        """The tracker that committed (offset, metadata). Raises ValueError for metadata that is not ours."""
        tracker = cls(committed)
        if metadata:
            if not metadata.startswith(_VERSION):
                raise ValueError(f"commit metadata of an unknown version: {metadata[:16]!r}")
            span, *gaps = _numbers(b64decode(metadata[len(_VERSION) :], validate=True))
            offset = committed
            tracker._pending[offset] = False
            for gap in gaps:
                offset += gap
                tracker._pending[offset] = False
                tracker._packed_bound += _varint_bytes(gap)
            tracker.high = committed + span
            if 0 in gaps or offset >= tracker.high:
                raise ValueError("commit metadata contradicts itself")
        return tracker

    def merge(self, other: Tracker) -> None:
        """Take over what `other` (restored from a commit) knows to be done; what runs here goes on running."""
        pending = {
            offset: running
            for offset, running in self._pending.items()
            if offset >= other.high or offset in other._pending
        } | {offset: False for offset in other._pending if offset >= self.high}
        self._pending = OrderedDict(sorted(pending.items()))
        self._packed_bound = _PACKED_BYTES  # not known any more: room_for counts it anew
        self.high = max(self.high, other.high)


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def _varint(number: int) -> bytes:
    """LEB128."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _numbers(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number, shift = 0, 0
    if shift or not numbers:
        raise ValueError("commit metadata is cut short")
    return numbers
