"""One assigned partition: its chain, its open shard, and what is still to be proved or told."""

from __future__ import annotations

from collections.abc import Sequence

from services.kernel.errors import Fatal
from services.kernel.retry import Backoff
from services.sink.arrivals import Arrival
from services.sink.buffer import Buffer
from services.sink.chain import Chain


class Partition:
    """Made anew by every loading, so that records polled before it are told from those after it.

    `read_from` is where reading goes on: at the last record known, when it is still there, because its id shows whether
    this topic is the one the chain was made of."""

    def __init__(self, chain: Chain, buffer: Buffer, log_start: int) -> None:
        self.chain, self.buffer = chain, buffer
        self.read_from = buffer.end
        self._last_id: bytes | None = None
        if buffer.last_id is not None and buffer.end > log_start:
            self.read_from, self._last_id = buffer.end - 1, buffer.last_id
        self.hinted: int | None = None  # the offset Kafka was told
        self.not_before = 0.0  # the next commit, after one failed
        self._backoff = Backoff(base=0.5, cap=15.0)

    def take(self, arrivals: Sequence[Arrival], now: float) -> None:
        """Take in what follows. Raises Fatal when it does not follow, or does not belong to this chain."""
        first = arrivals[0]
        if self._last_id is not None and first.offset == self.read_from:
            if first.id != self._last_id:
                raise Fatal(
                    f"offset {first.offset} holds record {first.id.hex()}, but the chain has {self._last_id.hex()} "
                    "there: the topic was made anew, or the chain belongs to another. Take a new dataset"
                )
            self._last_id = None
            arrivals = arrivals[1:]
        if arrivals:
            self.buffer.add(arrivals, self.chain.seen, now)

    def commit(self) -> int | None:
        """Make the open shard the next of the chain and open a new one: its bytes, or None when another writer was
        first. Blocks. Raises Retry."""
        size = self.chain.commit(self.buffer)
        if size is not None:
            self._backoff.reset()
            self.buffer = Buffer(self.chain.tail, self.chain.last_id)
        return size

    def postpone(self, now: float) -> None:
        """The commit failed in a way that may pass."""
        self.not_before = now + self._backoff.next()
