"""Who gets the next free place on which engine.

Prompts wait in the order they came; the engine with the fewest requests in flight is taken first. A suspect, which was
in flight when engines died, gets an engine for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from services.generator.engine import Engine
from services.kernel.errors import Stopped

_LEAST_CAPACITY = 64


class Engines:
    """The pool. Whoever changes what an engine takes calls `hand_out`. While it is `paused`, and after `new_until` (of
    time.monotonic), only who has begun gets a place."""

    def __init__(self) -> None:
        self.all: list[Engine] = []
        self.paused = False
        self.new_until = math.inf
        self._begun: deque[asyncio.Future[Engine]] = deque()
        self._new: deque[asyncio.Future[Engine]] = deque()
        self._unwanted: dict[asyncio.Future[Engine], Callable[[], Exception | None]] = {}
        self._one_suspect = asyncio.Lock()
        self._released = asyncio.Event()
        self._closed = False

    @property
    def capacity(self) -> int:
        """Requests in flight when every engine is full."""
        return max(_LEAST_CAPACITY, sum(engine.window.limit for engine in self.all if not engine.retired))

    @property
    def waiting(self) -> int:
        """How many wait for their first place: no engine has heard of them."""
        return sum(not place.done() for place in self._new)

    @asynccontextmanager
    async def place(
        self, *, alone: bool = False, begun: bool = False, unwanted: Callable[[], Exception | None] = lambda: None
    ) -> AsyncIterator[Engine]:
        """A place on the least busy engine, as soon as there is one; `alone`: on an engine with nothing else of ours in
        flight, whose work is let finish first, one at a time; `begun`: it had one before, and goes before those that
        had none; `unwanted`: what it is told, when it is let go (see `let_go`). Raises Stopped when the pool is
        closed."""
        if not alone:
            engine = await self._acquire(begun, unwanted)
            try:
                yield engine
            finally:
                self._release(engine)
            return
        async with self._one_suspect:
            engine = await self._acquire(begun, unwanted)
            engine.reserved = True
            try:
                while engine.in_flight > 1:
                    self._released.clear()
                    await self._released.wait()
                yield engine
            finally:
                engine.reserved = False
                self._release(engine)

    async def _acquire(self, begun: bool = False, unwanted: Callable[[], Exception | None] = lambda: None) -> Engine:
        if self._closed:
            raise Stopped("no new requests: the generator is ending")
        place: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        (self._begun if begun else self._new).append(place)
        self._unwanted[place] = unwanted
        self.hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release(place.result())
            raise
        finally:
            del self._unwanted[place]

    def _release(self, engine: Engine) -> None:
        engine.in_flight -= 1
        self._released.set()
        self.hand_out()

    def close(self) -> None:
        """Give no more places: who waits for one, or asks for one, gets Stopped."""
        self._closed = True
        for place in [*self._begun, *self._new]:
            if not place.done():
                place.set_exception(Stopped("no new requests: the generator is ending"))

    def let_go(self) -> None:
        """Whoever waits and is not wanted any more gets what it is to be told, instead of a place: no engine is needed
        for that."""
        for place, unwanted in self._unwanted.items():
            if not place.done() and (error := unwanted()) is not None:
                place.set_exception(error)

    def hand_out(self) -> None:
        """Give free places to those who wait."""
        while (waiting := self._next_queue()) is not None:
            free = [engine for engine in self.all if engine.free]
            if not free:
                return
            engine = min(free, key=lambda engine: engine.in_flight)
            engine.in_flight += 1
            waiting.popleft().set_result(engine)

    def _next_queue(self) -> deque[asyncio.Future[Engine]] | None:
        """Whose turn it is. None when nobody waits who may have a place."""
        for queue in (self._begun, self._new):
            while queue and queue[0].done():  # cancelled while it waited
                queue.popleft()
            if queue and (queue is self._begun or not (self.paused or time.monotonic() >= self.new_until)):
                return queue
        return None
