"""How many prompts the generators have before them, so that ingest does not fill a disk a year ahead of them."""

from __future__ import annotations

import asyncio
import logging

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient

from services.kernel.groups import group_offsets, partitions_of
from services.kernel.kafka import Kafka

log = logging.getLogger("tokenhaul.ingest")

_LOOK_SECONDS = 2.0


class Backlog:
    """Offsets between what the generators committed and the end, with what was published since it was looked up.

    A little more than prompts: the markers of transactions take offsets too. `most`: 0 is no bound."""

    def __init__(self, kafka: Kafka, most: int) -> None:
        self._kafka, self._most = kafka, most
        self._measured = self._published = self._counted = 0
        self._was_full = False

    @property
    def size(self) -> int:
        """The backlog now."""
        return self._measured + self._published - self._counted

    @property
    def full(self) -> bool:
        """Whether reading has to wait."""
        full = bool(self._most) and self.size >= self._most
        if full != self._was_full:
            self._was_full = full
            log.info(
                "%d prompts wait for generators (TOKENHAUL_INGEST_BACKLOG %d): reading %s", self.size, self._most,
                "pauses" if full else "goes on", extra={"action": "backlog"},
            )  # fmt: skip
        return full

    def published(self, prompts: int) -> None:
        """So many more."""
        self._published += prompts

    async def follow(self) -> None:
        """For ever, if there is a bound: look it up. A Kafka that is away is not news here: the last size stands."""
        while self._most:
            try:
                async with (
                    self._kafka.started(self._kafka.admin) as admin,
                    self._kafka.started(lambda: self._kafka.consumer(None, "read_committed")) as consumer,
                ):
                    while True:
                        await self._look(admin, consumer)
                        await asyncio.sleep(_LOOK_SECONDS)
            except Exception as error:  # a broker that has just started knows no topics, and aiokafka stumbles over it
                log.warning("the backlog cannot be looked up: %r", error, extra={"action": "retry"})
                await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer) -> None:
        counted = self._published
        partitions = await partitions_of(admin, self._kafka.topics.prompts)
        committed = await group_offsets(admin, self._kafka.topics.generator_group, partitions)
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        self._measured = sum(
            max(0, ends[tp] - max(begins[tp], committed.get(tp.partition, (0, ""))[0])) for tp in partitions
        )
        self._counted = counted
