"""The end of aiokafka's clients, which leave things open or unsaid when they end in trouble."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

log = logging.getLogger("tokenhaul.kafka")


async def close(client: Any) -> None:
    """Stop a client without hanging on a broker that is gone."""
    if isinstance(client, AIOKafkaProducer):
        _look_at_failures(client)
    task = asyncio.create_task(_stopped(client))
    try:
        await asyncio.wait_for(task, 10.0)
    except (KafkaError, OSError, TimeoutError) as error:
        log.warning("closing a Kafka client: %r", error, extra={"action": "kafka_close"})


def _look_at_failures(producer: AIOKafkaProducer) -> None:
    """aiokafka fails futures of its own that nobody waits for when its sender ends, as it does when a producer is
    fenced: what failed was raised to whoever sent, and is not to be reported again as "never retrieved"."""
    manager = producer._txn_manager
    accumulator = producer._message_accumulator
    batches = [batch for queue in accumulator._batches.values() for batch in queue]
    for batch in (*batches, *accumulator._pending_batches):  # of `send_batch`: it shields them from who stops waiting
        batch.future.add_done_callback(lambda future: future.cancelled() or future.exception())
    for waiter in [*(batch._drain_waiter for batch in batches), manager and manager._transaction_waiter]:
        if waiter is not None and waiter.done() and not waiter.cancelled():
            waiter.exception()


async def _stopped(client: Any) -> None:
    try:
        await (client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())
    except (asyncio.CancelledError, KafkaError) as error:
        task = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError)
        if cancelled and (task is None or task.cancelling()):
            raise
        # aiokafka's consumer waits for fetches it has cancelled; one that slept is reported as our own cancellation,
        # and one that failed fails the stop. What comes after it, other fetches and all connections, stays open.
        if isinstance(client, AIOKafkaConsumer):
            if fetcher := client._fetcher:
                fetches = [fetcher._fetch_task, *fetcher._pending_tasks]
                for fetch in fetches:
                    fetch.cancel()
                await asyncio.wait(fetches)
            await client._client.close()
        if not cancelled:
            raise
