"""Batches on their way from lines to prompts, each in a thread, in the order they were read.

While some are encoded (Rust, each on a core) another one is rendered (Python, one at a time) and others are published.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.ingest.intake import Part
from services.ingest.portions import MOST_PROMPTS
from services.ingest.prompts import Made
from services.ingest.reader import Batch

# One renders while each core encodes. Rendering short chats takes a third as long as encoding them: of more threads
# most would wait for their turn at it.
_AT_ONCE = min(os.cpu_count() or 1, 8) + 1
_AHEAD = _AT_ONCE + 3


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

    @property
    def first_is_made(self) -> bool:
        """Whether there is something to publish."""
        return bool(self._tasks) and self._tasks[0][1].done()

    async def made(self) -> list[Part]:
        """The batch that was read first, once it is made, and of those after it that are made by then what goes into
        one transaction with it. They stay until they are done with."""
        await self._tasks[0][1]
        parts: list[Part] = []
        prompts = 0
        for batch, task in self._tasks:
            if not task.done() or task.exception():
                break
            part = Part(batch, task.result())
            prompts += len(part.made.prompts)
            if parts and prompts > MOST_PROMPTS:
                break
            parts.append(part)
        return parts

    def done(self) -> None:
        """The first one is done with."""
        self._tasks.popleft()

    async def cancel(self) -> None:
        """Forget all of them. A thread cannot be stopped: what it makes is thrown away."""
        for _, task in self._tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._tasks), return_exceptions=True)
        self._tasks.clear()
