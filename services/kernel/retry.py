"""Waiting between attempts: exponential, capped, with jitter so that many waiters spread out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable


class Backoff:
    """Seconds to wait before the next attempt: uniform in the upper half of base * 2^n, never above `cap`."""

    def __init__(self, base: float, cap: float, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._base, self._cap, self._uniform = base, cap, uniform
        self._failures = 0

    def next(self, asked: float | None = None) -> float:
        """The next wait; `asked` (a Retry-After) is a lower bound."""
        limit = min(self._cap, self._base * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return max(asked or 0.0, self._uniform(limit / 2, limit))

    def reset(self) -> None:
        """It worked: the next failure starts from the base again."""
        self._failures = 0


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `event`, but no longer than `seconds`; whether it is set."""
    return await any_set_within([event], seconds)


async def any_set_within(events: Iterable[asyncio.Event], seconds: float) -> bool:
    """Wait for one of `events`, but no longer than `seconds`; whether one is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        return bool((await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0])
    finally:
        for wait in waits:
            wait.cancel()
