"""Whether anything can still come from upstream. Asked by --until-idle only."""

from __future__ import annotations

import logging
import time

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from services.kernel.control import ControlView
from services.kernel.groups import caught_up, has_members
from services.kernel.kafka import Kafka

log = logging.getLogger("tokenhaul.sink")

_ASK_SECONDS = 1.0


class Upstream:
    """Idle when ingest has published all of this run, and the generators have published all outcomes of that; or when a
    budget has halted the generators and nothing is in flight any more.

    A generator commits, and says that it has stopped, after its outcomes are acknowledged: the ends of the sequences
    topic read from then on are final."""

    def __init__(
        self, kafka: Kafka, view: ControlView, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, run_id: str
    ) -> None:
        self._kafka, self._view, self._admin, self._consumer, self._run_id = kafka, view, admin, consumer, run_id
        self._idle = False
        self._asked = float("-inf")

    async def idle(self) -> bool:
        """Asks Kafka at most once a second; True stays True."""
        if not self._idle and time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked = time.monotonic()
            try:
                self._idle = await self._all_done() or await self._halted()
            except KafkaError as error:
                log.warning("not known whether anything is to come: %r", error, extra={"action": "idle"})
        return self._idle

    async def _all_done(self) -> bool:
        topics = self._kafka.topics
        return self._view.idle(self._run_id) is not None and await caught_up(
            self._admin, self._consumer, topics.generator_group, topics.prompts
        )

    async def _halted(self) -> bool:
        """One that was killed never says that it has stopped: then it is enough that nobody is left."""
        return self._view.stopped or (
            self._view.halt.halted and not await has_members(self._admin, self._kafka.topics.generator_group)
        )
