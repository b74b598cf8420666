"""What the control topic says, followed as it grows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from schemas.control import Control, Idle, idle_key
from services.kernel.codec import Decoder
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka, partitions_of

log = logging.getLogger("tokenhaul.control")


class ControlView:
    """The latest message of every key."""

    def __init__(self) -> None:
        self._latest: dict[bytes, Control] = {}

    def idle(self, run: str) -> Idle | None:
        """The idle mark of a run, once ingest has written it."""
        message = self._latest.get(idle_key(run))
        return message if isinstance(message, Idle) else None

    def update(self, key: bytes, message: Control) -> None:
        """A newer message of `key`."""
        self._latest[key] = message


@asynccontextmanager
async def following(
    kafka: Kafka, spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
) -> AsyncIterator[ControlView]:
    """A view that keeps up with the control topic while inside; `spawn` runs what follows it (Context.spawn)."""
    view = ControlView()
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    async with kafka.started(kafka.admin) as admin:
        partitions = await partitions_of(admin, kafka.topics.control)
    async with kafka.started(lambda: kafka.consumer(None, "read_committed")) as consumer:
        consumer.assign(partitions)
        for partition, offset in (await consumer.beginning_offsets(partitions)).items():
            consumer.seek(partition, offset)

        async def follow() -> None:
            while True:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    for record in records:
                        try:
                            view.update(record.key, decoder.decode(record.value))
                        except Reject as reject:
                            # A newer version may write messages this one does not know: say so and go on.
                            log.warning("control message ignored: %s", reject.detail, extra={"offset": record.offset})

        task = spawn(follow())
        try:
            yield view
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
