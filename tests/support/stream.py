"""Prompts put on a topic and outcomes read from one, as the services next door would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from schemas import ids
from schemas.control import Idle, SourceTotals, idle_key
from schemas.prompts import Prompt, SourceRef
from schemas.sequences import Outcome
from services.kernel import topics
from services.kernel.codec import Decoder, Encoder, schema_of
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context, ProcessSettings, Service
from services.local.kafka import free_ports

MODEL = "fake"
PARTITIONS = 3


def make_prompt(number: int, *, prompt_ids: list[int] | None = None, max_new_tokens: int = 64) -> Prompt:
    """A prompt of its own for each number."""
    prompt_ids = prompt_ids or [1, 1000 + number, 2, 198]
    sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "stop_token_ids": [2]}
    id = ids.record_id(prompt_ids, MODEL, sampling, 0, 0)
    return Prompt(
        id=id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        seed=ids.seed(id),
        source="test",
        source_ref=SourceRef("test.jsonl", number + 1),
        conversation_id=str(number),
        model=MODEL,
        vocab_size=49152,
        context_length=8192,
        tokenizer_fingerprint="none",
        created_at=time.time(),
    )


async def create_topics(kafka: Kafka, partitions: int = PARTITIONS) -> None:
    """The topics of a dataset called "test"."""
    await topics.create(kafka, topics.new_dataset("test", MODEL, partitions), replication=1, min_isr=1)


async def configure(kafka: Kafka, *names: str, **changes: str) -> None:
    """Change what Kafka does with these topics, `a_b` for "a.b". It takes a topic's settings as a whole: what is not
    among `changes` becomes what it must be."""
    changed = {key.replace("_", "."): value for key, value in changes.items()}
    required = topics.required(kafka, PARTITIONS)
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, required[name][1] | changed) for name in names]
    async with kafka.started(kafka.admin) as admin:
        answers = await kafka.patiently(lambda: admin.alter_configs(resources))
    assert not [resource for answer in answers for resource in answer.resources if resource[0]]


async def publish(kafka: Kafka, prompts: list[Prompt], batch: int = 7, partitions: int = PARTITIONS) -> None:
    """Publish in transactions of `batch`, as ingest does: their markers leave holes among the offsets."""
    encoder = Encoder()
    async with kafka.started(lambda: kafka.producer(transactional_id=f"{kafka.settings.prefix}.ingest")) as producer:
        for start in range(0, len(prompts), batch):
            async with producer.transaction():
                for prompt in prompts[start : start + batch]:
                    await producer.send(
                        kafka.topics.prompts,
                        encoder.encode(prompt),
                        partition=ids.partition(prompt.id, partitions),
                        headers=[("schema", schema_of(prompt)), ("id", prompt.id)],
                    )


async def publish_outcomes(kafka: Kafka, outcomes: Sequence[Outcome]) -> None:
    """Publish as a generator does, in this order."""
    encoder = Encoder()
    async with kafka.started(kafka.producer) as producer:
        for outcome in outcomes:
            await producer.send(
                kafka.topics.sequences,
                encoder.encode(outcome),
                partition=ids.partition(outcome.record_id, PARTITIONS),
                headers=[("schema", schema_of(outcome)), ("id", outcome.record_id)],
            )
        await producer.flush()


async def mark_idle(kafka: Kafka, run: str) -> None:
    """What ingest writes when its sources are at their ends."""
    mark = Idle(run=run, sources={"test": SourceTotals()}, created_at=time.time())
    async with kafka.started(kafka.producer) as producer:
        await producer.send_and_wait(kafka.topics.control, Encoder().encode(mark), key=idle_key(run))


async def read_outcomes(kafka: Kafka) -> list[Outcome]:
    """All there is on the sequences topic."""
    decoder: Decoder[Outcome] = Decoder(Outcome)  # type: ignore[arg-type]
    records = [record async for record in kafka.read_all(kafka.topics.sequences, "read_uncommitted")]
    outcomes = [decoder.decode(record.value) for record in records]
    for record, outcome in zip(records, outcomes, strict=True):
        assert record.partition == ids.partition(outcome.record_id, PARTITIONS)
        assert dict(record.headers)["id"] == outcome.record_id
    return outcomes


@asynccontextmanager
async def running(
    service: Service, run: str = "", **process: object
) -> AsyncIterator[tuple[Context, asyncio.Task[None]]]:
    """The service, running in this process. Leaving cancels it, which is as rude as a kill: nothing is drained."""
    settings = ProcessSettings(run_id=run, metrics_port=free_ports(1)[0], **process)  # type: ignore[arg-type]
    context = Context(settings, until_idle=bool(run))
    task = asyncio.create_task(context.run(service.run(context)))
    try:
        yield context, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 30.0) -> None:
    """Return when `condition` holds; fail when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        await asyncio.sleep(0.05)
