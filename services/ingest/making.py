"""Batches on their way from lines to prompts, each in a thread, in the order they were read.

While one is encoded (Rust, all cores) the next one is rendered (Python, one core) and a third is published.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.ingest.intake import Part
from services.ingest.prompts import Made
from services.ingest.reader import Batch

_AHEAD = 3


class Making:
    """Not more than a few at a time."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Batch, asyncio.Task[Made]]] = deque()

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
        self._tasks.append((batch, asyncio.create_task(asyncio.to_thread(make, batch))))

    async def first(self) -> Part:
        """The batch that was read first, once it is made. It stays the first until it is done with."""
        batch, task = self._tasks[0]
        return Part(batch, await task)

    def done(self) -> None:
        """The first one is done with."""
        self._tasks.popleft()

    async def cancel(self) -> None:
        """Forget all of them. A thread cannot be stopped: what it makes is thrown away."""
        for _, task in self._tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._tasks), return_exceptions=True)
        self._tasks.clear()
