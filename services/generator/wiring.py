"""What a generator is made of: connected and put together here, taken apart in the opposite order."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack

import msgspec

from services.generator.attempts import Attempts
from services.generator.budget import Budget
from services.generator.engines import Engines
from services.generator.http import HttpClient
from services.generator.in_flight import InFlight
from services.generator.metrics import GeneratorMetrics
from services.generator.offsets import Offsets
from services.generator.outcomes import Outcomes
from services.generator.settings import GeneratorSettings
from services.generator.watch import Watch
from services.kernel import control, topics
from services.kernel.control import ControlView
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context
from services.kernel.publisher import Publisher


class Parts(msgspec.Struct, frozen=True):
    """What the service's page speaks of."""

    view: ControlView
    engines: Engines
    attempts: Attempts
    in_flight: InFlight
    outcomes: Outcomes
    offsets: Offsets
    budget: Budget


async def connect(
    settings: GeneratorSettings,
    kafka: Kafka,
    trust: ssl.SSLContext | None,
    metrics: GeneratorMetrics,
    context: Context,
    stack: AsyncExitStack,
) -> Parts:
    """Wait for Kafka as long as it takes; all ends with `stack`. Raises Fatal when topics are not as they must be."""
    names, engines = kafka.topics, Engines()
    dataset = await topics.check(kafka)
    view = await stack.enter_async_context(control.following(kafka, context.spawn))
    admin = await stack.enter_async_context(kafka.started(kafka.admin))
    consumer = await stack.enter_async_context(
        kafka.started(lambda: kafka.consumer(names.generator_group, "read_committed"))
    )
    publisher = await stack.enter_async_context(Publisher(kafka, context.spawn, metrics.producers_replaced.inc))
    http = await stack.enter_async_context(HttpClient(trust, settings.api_key))
    in_flight = InFlight(context.fail)
    stack.push_async_callback(in_flight.close)
    offsets = Offsets(
        names,
        consumer,
        admin,
        context.fail,
        in_flight.cancel,
        kafka.settings.session_timeout_seconds,
        metrics,
        from_start=settings.from_start,
    )
    stack.push_async_callback(offsets.member.close)
    budget = Budget(settings, view, publisher, names.control, kafka.settings.instance)
    await budget.begin()
    watch = Watch(settings, dataset.model, view.probes, engines, http, metrics)
    stack.push_async_callback(_ended, context.spawn(watch.run()))  # before its client is closed under it
    return Parts(
        view=view,
        engines=engines,
        attempts=Attempts(settings, engines, http, metrics, view.cancelled),
        in_flight=in_flight,
        outcomes=Outcomes(publisher, names.sequences, dataset.partitions),
        offsets=offsets,
        budget=budget,
    )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
