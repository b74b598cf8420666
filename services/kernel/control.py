"""What the control topic says, followed as it grows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from aiokafka import ConsumerRecord

from schemas.control import (
    HALT_KEY,
    PROBES_KEY,
    Cancel,
    Control,
    Halt,
    Idle,
    Probes,
    Regenerate,
    Replay,
    Spent,
    cancel_key,
    idle_key,
)
from services.kernel.codec import Decoder
from services.kernel.errors import Reject
from services.kernel.groups import partitions_of
from services.kernel.kafka import Kafka

log = logging.getLogger("tokenhaul.control")


class ControlView:
    """The latest message of every key."""

    def __init__(self) -> None:
        self._latest: dict[bytes, Control] = {}
        self.announced = 0  # how often probes were told: every ingest does so once, when it begins

    def idle(self, run: str) -> Idle | None:
        """The idle mark of a run, once ingest has written it."""
        message = self._latest.get(idle_key(run))
        return message if isinstance(message, Idle) else None

    @property
    def halt(self) -> Halt:
        """The last word on whether generators may take in prompts."""
        message = self._latest.get(HALT_KEY)
        return message if isinstance(message, Halt) else Halt(halted=False, epoch=0, created_at=0.0)

    def cancelled(self, source: str, created_at: float) -> bool:
        """Whether a prompt of `source`, made at that time, was cancelled."""
        message = self._latest.get(cancel_key(source))
        return isinstance(message, Cancel) and created_at < message.created_at

    def probes(self) -> Probes | None:
        """What engines' tokenizers are held against, once ingest has written it."""
        message = self._latest.get(PROBES_KEY)
        return message if isinstance(message, Probes) else None

    def regenerations(self) -> list[Regenerate]:
        """All commands to ask prompts again, the oldest first; those not done are waiting for ingest."""
        found = [message for message in self._latest.values() if isinstance(message, Regenerate)]
        return sorted(found, key=lambda message: (message.created_at, message.command))

    def replays(self) -> list[Replay]:
        """Commands to ask failed prompts again that wait for ingest, the oldest first."""
        found = [message for message in self._latest.values() if isinstance(message, Replay) and not message.done]
        return sorted(found, key=lambda message: (message.created_at, message.command))

    def spent(self) -> list[Spent]:
        """What all generators have made in the epoch of now."""
        epoch = self.halt.epoch
        return [message for message in self._latest.values() if isinstance(message, Spent) and message.epoch == epoch]

    @property
    def stopped(self) -> bool:
        """Whether a halt is obeyed by all: every generator that counts in this epoch has nothing in flight any more."""
        spent = self.spent()
        return self.halt.halted and bool(spent) and all(each.stopped for each in spent)

    def update(self, key: bytes, message: Control) -> None:
        """A newer message of `key`."""
        self._latest[key] = message
        self.announced += key == PROBES_KEY


async def read(kafka: Kafka) -> ControlView:
    """What is said now."""
    view, decoder = ControlView(), _decoder()
    async for record in kafka.read_all(kafka.topics.control):
        _take(view, decoder, record)
    return view


def _decoder() -> Decoder[Control]:
    return Decoder(Control)  # type: ignore[arg-type]


def _take(view: ControlView, decoder: Decoder[Control], record: ConsumerRecord) -> None:
    try:
        view.update(record.key, decoder.decode(record.value))
    except Reject as reject:
        # A newer version may write messages this one does not know: say so and go on.
        log.warning(
            "control message ignored: %s", reject.detail,
            extra={"action": "control", "topic": record.topic, "offset": record.offset},
        )  # fmt: skip


@asynccontextmanager
async def following(
    kafka: Kafka, spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
) -> AsyncIterator[ControlView]:
    """A view that keeps up with the control topic while inside; `spawn` runs what follows it (Context.spawn)."""
    view, decoder = ControlView(), _decoder()
    async with kafka.started(kafka.admin) as admin:
        partitions = await kafka.patiently(lambda: partitions_of(admin, kafka.topics.control))
    async with kafka.started(lambda: kafka.consumer(None, "read_committed")) as consumer:
        consumer.assign(partitions)
        ends = await kafka.patiently(lambda: consumer.end_offsets(partitions))
        for partition, offset in (await kafka.patiently(lambda: consumer.beginning_offsets(partitions))).items():
            consumer.seek(partition, offset)

        async def take(timeout_ms: int) -> None:
            for records in (await consumer.getmany(timeout_ms=timeout_ms)).values():
                for record in records:
                    _take(view, decoder, record)

        async def follow() -> None:
            while True:
                await take(timeout_ms=1000)

        # What was said before is known before anything is done: a halt holds for who comes later, too.
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            await take(timeout_ms=200)
        task = spawn(follow())
        try:
            yield view
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
