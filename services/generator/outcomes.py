"""Outcomes on their way to the sequences topic, the two included that no attempt made."""

from __future__ import annotations

import time

from aiokafka import ConsumerRecord

from schemas import ids
from schemas.sequences import Failure, FailureReason, Outcome
from services.kernel.codec import Encoder, schema_of
from services.kernel.errors import Reject
from services.kernel.kafka import MAX_VALUE_BYTES
from services.kernel.publisher import Publisher


class Outcomes:
    """Publishes each outcome to the partition of its record id."""

    def __init__(self, publisher: Publisher, topic: str, partitions: int) -> None:
        self._publisher, self._topic, self._partitions = publisher, topic, partitions
        self._encoder = Encoder()

    async def publish(self, outcome: Outcome) -> None:
        """Return when all in-sync replicas have the outcome."""
        value = self._encoder.encode(outcome)
        if len(value) > MAX_VALUE_BYTES:
            outcome = _too_large(outcome, len(value))
            value = self._encoder.encode(outcome)
        await self._publisher.publish(
            self._topic,
            value,
            partition=ids.partition(outcome.record_id, self._partitions),
            headers=[("schema", schema_of(outcome)), ("id", outcome.record_id)],
        )


def undecodable(record: ConsumerRecord, reject: Reject) -> Failure:
    """The failure of a record of the prompts topic that cannot be read; its id is in a header or made of its place."""
    id = dict(record.headers).get("id", b"")
    return Failure(
        id=id if len(id) == ids.ID_BYTES else ids.origin_id(record.topic, record.partition, record.offset),
        reason=FailureReason.UNDECODABLE,
        detail=f"{record.topic}/{record.partition} offset {record.offset}: {reject.detail}",
        failed_at=time.time(),
    )


def _too_large(outcome: Outcome, size: int) -> Failure:
    """The failure of an outcome Kafka would refuse. Without the prompt, which may be the large part of it."""
    return Failure(
        id=outcome.record_id,
        reason=FailureReason.TOO_LARGE,
        detail=f"the outcome has {size} bytes, Kafka takes {MAX_VALUE_BYTES}",
        rids=outcome.rids,
        attempts=outcome.attempts,
        failed_at=time.time(),
    )
