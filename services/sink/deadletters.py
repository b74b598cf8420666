"""Failures on their way to the dead topic, where people and tools find them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas.dead import DeadLetter
from services.kernel.closing import close
from services.kernel.errors import Retry
from services.kernel.kafka import Kafka

_SCHEMA = str(DeadLetter.__struct_config__.tag).encode()


class DeadLetters:
    """Publishes at least once: the topic is read as a set of record ids."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self._producer: AIOKafkaProducer | None = None

    async def publish(self, letters: Sequence[tuple[bytes, bytes]]) -> None:
        """Return when all in-sync replicas have the `letters`: (record id, encoded). Raises Retry."""
        if not letters:
            return
        try:
            if self._producer is None:
                self._producer = self._kafka.producer()
                await self._producer.start()
            sent = [
                await self._producer.send(
                    self._kafka.topics.dead, letter, key=id, headers=[("schema", _SCHEMA), ("id", id)]
                )
                for id, letter in letters
            ]
            await asyncio.gather(*sent)
        except (KafkaError, OSError) as error:
            # A batch that failed has spent its sequence numbers: this producer's next one might be refused for ever.
            await self.close()
            raise Retry("dead_letters", f"{self._kafka.topics.dead} at {self._kafka.address}: {error!r}") from error

    async def close(self) -> None:
        """Let go of the broker."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await close(producer)
