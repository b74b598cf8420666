"""The prompts being worked on, by partition: those of a lost partition are let go, all are waited for at the end."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine

log = logging.getLogger("tokenhaul.generator")


class InFlight:
    """A task for each. What one fails with ends the generator (`fail`)."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._tasks: defaultdict[int, dict[int, asyncio.Task[None]]] = defaultdict(dict)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def start(self, partition: int, offset: int, work: Coroutine[None, None, None]) -> None:
        """Work on the prompt that stands there."""
        tasks = self._tasks[partition]
        tasks[offset] = task = asyncio.create_task(work)
        self._count += 1

        def ended(task: asyncio.Task[None]) -> None:
            if tasks.get(offset) is task:
                del tasks[offset]
            self._count -= 1
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        task.add_done_callback(ended)

    def cancel(self, partition: int, unless: Callable[[int], bool]) -> None:
        """Somebody else has the partition, or has done those offsets. Cancelling closes the connections: the engines
        stop generating."""
        for offset, task in list(self._tasks[partition].items()):
            if not unless(offset):
                task.cancel()

    async def finish(self, seconds: float) -> None:
        """Let all end within `seconds`."""
        if tasks := self._all():
            _, unfinished = await asyncio.wait(tasks, timeout=seconds)
            log.info("%d of %d ended in time", len(tasks) - len(unfinished), len(tasks), extra={"action": "drain"})

    async def close(self) -> None:
        """Cancel what is left."""
        tasks = self._all()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _all(self) -> set[asyncio.Task[None]]:
        return {task for tasks in self._tasks.values() for task in tasks.values()}
