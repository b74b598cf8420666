"""How many requests one generator may have in flight on one engine, from what the engine says of itself. Pure.

An engine gives its best when its batch is full and its queue short. What it takes is not known and changes (KV pool,
output lengths, other clients), so the window follows `/v1/loads`: up while nothing waits, down by our share of what
waits too much. Steps up are equal for all generators and steps down proportional to what each has in flight, so that
generators that share an engine end up with equal shares of it (AIMD).

- What waits is taken as the least of the last samples: a burst that the engine is about to take in is no queue.
- Down is counted from what is in flight, not from the window: until requests end nothing changes at the engine, and a
  second look must not take the same off again.
- Up doubles until something has waited once, then goes in equal steps that grow while nothing waits: an engine whose
  capacity doubled is found again within seconds.
- Once the queue is right nothing would change any more, and who came late would stay with a place or two for ever. So
  everybody asks for one more now and then: the queue gets too long by equal shares, and shrinks by proportional ones.
- A retraction throws a prefill away, which is paid for again: the window shrinks by a fifth and stays for a while.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec

_SAMPLES = 2
_QUEUE_SHARE = 0.05  # of what runs: so much may wait, lest a place stands empty until we hear of it
_USAGE_FULL = 0.95
_SHRINK = 0.8
_HOLD_SECONDS = 10.0
_ASK_SHARE = 0.2  # of the looks at a queue that is right


class Load(msgspec.Struct, frozen=True):
    """What an engine says: requests running and waiting in all its ranks (of all its clients), the share of its KV pool
    in use in the fullest rank, and requests it has retracted just now."""

    running: int
    waiting: int
    usage: float
    retracted: int


class Window:
    """The limit of one engine, between 1 and `most`. Times are seconds of any steady clock."""

    def __init__(self, start: int, most: int, jitter: Callable[[float, float], float] = random.uniform) -> None:
        self.limit = min(start, most)
        self._most, self._jitter = most, jitter
        self._waiting: deque[int] = deque(maxlen=_SAMPLES)
        self._step = 0.0  # 0: still doubling
        self._hold_until = float("-inf")

    def update(self, now: float, load: Load, in_flight: int) -> None:
        """Take a sample in; `in_flight` are our own requests at the engine."""
        self._waiting.append(load.waiting)
        standing = min(self._waiting) if len(self._waiting) == _SAMPLES else 0
        allowed = max(1.0, _QUEUE_SHARE * load.running)
        if load.retracted:
            self._shrink(now, in_flight)
        elif standing > allowed:
            share = in_flight / max(in_flight, load.running + load.waiting)
            self._set(in_flight - (standing - allowed / 2) * share)
            self._step = self._first_step(load)
        elif load.usage >= _USAGE_FULL or in_flight < self.limit or now < self._hold_until:
            return
        elif not load.waiting:
            self._grow()
        elif load.waiting < allowed and self._jitter(0.0, 1.0) < _ASK_SHARE:
            self._set(self.limit + 1)

    def unseen(self, now: float, in_flight: int) -> None:
        """The engine does not tell its load (a router): one more, as long as nothing is refused."""
        if in_flight >= self.limit and now >= self._hold_until:
            self._set(self.limit + 1)

    def refused(self, now: float, in_flight: int) -> None:
        """The engine (or a router before it) answered 503 or 429: too many, by how much it does not say."""
        if now >= self._hold_until:
            self._shrink(now, in_flight)

    def _shrink(self, now: float, in_flight: int) -> None:
        self._set(min(self.limit, in_flight) * _SHRINK)
        self._step = max(1.0, self.limit * 0.02)
        self._hold_until = now + _HOLD_SECONDS * self._jitter(0.7, 1.3)

    def _grow(self) -> None:
        if self._step:
            self._set(self.limit + self._step * self._jitter(0.7, 1.3))
            self._step *= 1.5
        else:
            self._set(self.limit * 2)

    @staticmethod
    def _first_step(load: Load) -> float:
        return max(1.0, 0.02 * load.running)

    def _set(self, limit: float) -> None:
        self.limit = max(1, min(self._most, round(limit)))
