"""The pipeline on one machine: what runs, in which order it starts and ends, when it is done."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import msgspec
from aiokafka import ConsumerRecord

from schemas.control import Idle
from schemas.dead import DeadLetter
from services.generator.command import resume
from services.kernel import control, topics
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import describe, load
from services.local.kafka import LocalKafka, free_ports
from services.local.processes import Child, end
from services.local.progress import Progress

_POLL_SECONDS = 0.25
_END_SECONDS = 15.0
_ANSWER_SECONDS = 10.0
_KAFKA_SECONDS = 120.0
_SECURITY = re.compile(r"TOKENHAUL_KAFKA_(SECURITY|SASL|SSL)_")
_ENGINE_SLOTS = 4
_ENGINE_CONTEXT = 2048
_ENGINE_MODEL = "SmolLM2-135M-Instruct.Q4_1"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Without `engines` and `kafka`, local ones are started."""

    out: Path
    dataset: str
    model: str
    tokenizer: Path
    engines: list[str]
    kafka: str | None
    partitions: int
    sources: Path
    limits: dict[str, str] = {}
    """Budgets of the generator, by variable."""
    resume: bool = False
    """Lift the halt of an earlier run."""

    @property
    def prefix(self) -> str:
        """Of the topics: every output directory has its own, also on a Kafka that others use."""
        place = hashlib.blake2b(str(self.out).encode(), digest_size=4).hexdigest()
        return f"tokenhaul-{self.dataset}-{place}"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, as Kafka tells it."""

    idle: Idle
    published: int
    """Prompts on the topic, of all runs into this dataset."""
    dead: list[DeadLetter]
    since: float
    """When the run began, Unix time."""
    seconds: float
    restarts: dict[str, int]
    halted: str
    """Which budget has stopped the generators; empty when none has."""


def run(plan: Plan) -> Result:
    """Run to the end. Raises Fatal when something ends that must not; leaves no process behind, however it ends."""
    since, started = time.time(), time.monotonic()
    infrastructure: list[Child] = []
    services: list[Child] = []
    try:
        environ = _kafka_environ(plan, _start_kafka(plan, infrastructure))
        kafka = Kafka(load(KafkaSettings, os.environ | environ))
        engines = plan.engines or [_start_engine(plan, infrastructure)]
        asyncio.run(_prepare(plan, kafka))
        run_id = uuid.uuid4().hex
        with Progress(_log(plan, "generate")) as progress:
            for name in ("ingest", "generate", "sink"):
                services.append(_start_service(plan, name, environ, engines, run_id, progress))
            _watch(infrastructure, services, progress, lambda: asyncio.run(_soon(_idle_mark(kafka, run_id))))
        return asyncio.run(_result(kafka, run_id, since, time.monotonic() - started, infrastructure + services))
    finally:
        end(services, _END_SECONDS)
        end(infrastructure, _END_SECONDS)


def _watch(
    infrastructure: list[Child], services: list[Child], progress: Progress, idle_mark: Callable[[], Idle]
) -> None:
    """Until all services have ended by themselves: start again what was killed, show how far it is."""
    ingest = services[0]
    while not all(service.done for service in services):
        for child in infrastructure + services:
            if child.keep_running():
                progress.say(f"{child.name} was killed: started again")
        if ingest.done and progress.prompts is None:
            with suppress(TimeoutError):  # Kafka may be the one that was killed: it is started again in this loop
                progress.prompts = sum(totals.published for totals in idle_mark().sources.values())
        progress.update()
        time.sleep(_POLL_SECONDS)


def _start_kafka(plan: Plan, children: list[Child]) -> str:
    if plan.kafka:
        return plan.kafka
    node = LocalKafka(plan.out / ".run" / "kafka")
    node.prepare()
    broker = Child("kafka", node.command, _log(plan, "kafka"), os.environ)
    children.append(broker)
    deadline = time.monotonic() + _KAFKA_SECONDS
    while not node.listens():
        if broker.keep_running() or time.monotonic() > deadline:
            raise Fatal(f"Kafka did not start; the end of {broker.log}:\n{broker.tail()}")
        time.sleep(_POLL_SECONDS)
    return node.bootstrap


def _start_engine(plan: Plan, children: list[Child]) -> str:
    (port,) = free_ports(1)
    command = [*_TOKENHAUL, "engine", "--port", str(port)]
    command += ["--slots", str(_ENGINE_SLOTS), "--context", str(_ENGINE_CONTEXT)]
    children.append(Child("engine", command, _log(plan, "engine"), os.environ | {"OMP_NUM_THREADS": "1"}))
    return f"http://127.0.0.1:{port}"


def _kafka_environ(plan: Plan, bootstrap: str) -> dict[str, str]:
    """How Kafka is spoken to, here and in the services, over what the environment says. The local node takes neither
    TLS nor users: what is set for another Kafka is unset."""
    environ = {"TOKENHAUL_KAFKA_BOOTSTRAP": bootstrap, "TOKENHAUL_KAFKA_PREFIX": plan.prefix}
    unset = [] if plan.kafka else [each.variable for each in describe(KafkaSettings) if _SECURITY.match(each.variable)]
    return dict.fromkeys(unset, "") | environ


def _start_service(
    plan: Plan, name: str, kafka: dict[str, str], engines: list[str], run_id: str, progress: Progress
) -> Child:
    (port,) = free_ports(1)
    progress.watch(name, port)
    settings = {
        "TOKENHAUL_RUN_ID": run_id,
        "TOKENHAUL_LOG_FORMAT": "json",
        "TOKENHAUL_METRICS_PORT": str(port),
        "TOKENHAUL_DRAIN_SECONDS": "5",
        **kafka,
        # A static member that is killed and started again has its partitions at once.
        "TOKENHAUL_KAFKA_INSTANCE": f"{name}-0",
        "TOKENHAUL_INGEST_SOURCES_FILE": str(plan.sources),
        "TOKENHAUL_INGEST_TOKENIZER": str(plan.tokenizer),
        "TOKENHAUL_GENERATOR_ENGINES": ",".join(engines),
        "TOKENHAUL_SINK_ROOT": str(plan.out),
        "TOKENHAUL_SINK_MAX_AGE_SECONDS": "30",
    }
    if not plan.engines:
        settings["TOKENHAUL_GENERATOR_MODEL_PATH"] = _ENGINE_MODEL
        settings["TOKENHAUL_INGEST_CONTEXT_LENGTH"] = str(_ENGINE_CONTEXT)
    return Child(name, [*_TOKENHAUL, name, "--until-idle"], _log(plan, name), os.environ | settings | plan.limits)


_TOKENHAUL = (sys.executable, "-m", "services.cli")


def _log(plan: Plan, name: str) -> Path:
    return plan.out / ".run" / f"{name}.log"


async def _prepare(plan: Plan, kafka: Kafka) -> None:
    async with kafka.started(kafka.admin) as admin:
        brokers = len((await admin.describe_cluster())["brokers"])
    replication = min(3, brokers)
    dataset = topics.new_dataset(plan.dataset, plan.model, plan.partitions)
    await topics.create(kafka, dataset, replication, min_isr=2 if replication == 3 else 1)
    if plan.resume:
        await resume(kafka)


async def _soon(mark: Coroutine[None, None, Idle]) -> Idle:
    """Raises TimeoutError when Kafka does not answer."""
    return await asyncio.wait_for(mark, _ANSWER_SECONDS)


async def _idle_mark(kafka: Kafka, run_id: str) -> Idle:
    """What ingest wrote when it ended. Raises Fatal when it did not."""
    mark = (await control.read(kafka)).idle(run_id)
    if mark is None:
        raise Fatal(f"no idle mark of run {run_id} in {kafka.topics.control}, although ingest ended well")
    return mark


def _id(record: ConsumerRecord) -> bytes:
    return bytes(dict(record.headers)["id"])


async def _result(kafka: Kafka, run_id: str, since: float, seconds: float, children: list[Child]) -> Result:
    letters = Decoder(DeadLetter)
    return Result(
        idle=await _idle_mark(kafka, run_id),
        published=len({_id(record) async for record in kafka.read_all(kafka.topics.prompts)}),
        dead=[letters.decode(record.value) async for record in kafka.read_all(kafka.topics.dead)],
        since=since,
        seconds=seconds,
        halted=(await control.read(kafka)).halt.reason,
        restarts={child.name: child.restarts for child in children if child.restarts},
    )
