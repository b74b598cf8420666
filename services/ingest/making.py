"""Batches on their way from lines to prompts, each in a thread, in the order they were read.

While some are encoded (Rust, each on a core) another one is rendered (Python, one at a time) and others are published.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.ingest.intake import Part
from services.ingest.prompts import Made
from services.ingest.reader import Batch

# One renders while each core encodes. Rendering takes a third as long as encoding, so more of them would wait for it.
_AT_ONCE = min(os.cpu_count() or 1, 4) + 1
_AHEAD = 2 * _AT_ONCE


class Making:
    """Not more than a few at a time."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Batch, asyncio.Future[Made]]] = deque()
        self._threads = ThreadPoolExecutor(_AT_ONCE, "making")
        # So long a thread that renders keeps the loop from an answer of Kafka's, of which a transaction has a dozen.
        sys.setswitchinterval(0.0005)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def room(self) -> bool:
        """Whether another one may be started."""
        return len(self._tasks) < _AHEAD

    @property
    def records(self) -> int:
        """How many there are in all batches."""
        return sum(len(batch.lines) for batch, _ in self._tasks)

    def start(self, make: Callable[[Batch], Made], batch: Batch) -> None:
        """Begin with a batch."""
        made = asyncio.get_running_loop().run_in_executor(self._threads, make, batch)
        self._tasks.append((batch, made))

    async def made(self) -> list[Part]:
        """The batch that was read first, once it is made, and those after it that are made by then. They stay until
        they are done with."""
        await self._tasks[0][1]
        made = itertools.takewhile(lambda item: item[1].done() and not item[1].exception(), self._tasks)
        return [Part(batch, task.result()) for batch, task in made]

    def done(self) -> None:
        """The first one is done with."""
        self._tasks.popleft()

    async def cancel(self) -> None:
        """Forget all of them. A thread cannot be stopped: what it makes is thrown away."""
        for _, task in self._tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._tasks), return_exceptions=True)
        self._tasks.clear()
