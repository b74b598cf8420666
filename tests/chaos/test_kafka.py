"""What happens to three Kafka nodes, one fault a test: every prompt ends as one row, and none is paid for twice.

Generator and sink run in this process, the brokers are real. `make chaos` runs these, `make test` does not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaTimeoutError, NotEnoughReplicasError

from schemas.prompts import Prompt
from services.generator.service import Generator
from services.kernel import topics
from services.kernel.codec import Encoder
from services.kernel.health import Health
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.sink import service as sink
from services.sink.verify import verify
from tests.integration.test_generator import asked, make_generator
from tests.integration.test_ingest import Ingest
from tests.support.cluster import Cluster
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel
from tests.support.processes import wait_for
from tests.support.stream import (
    MODEL,
    PARTITIONS,
    configure,
    eventually,
    make_prompt,
    publish,
    running,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
# Slow enough for what is in flight, or ends within a second, to be few beside the prompts.
WINDOW = 4
LATENCY = 0.25
COMMIT_SECONDS = 1.0
TRANSACTION_SECONDS = 15.0
SCAN_SECONDS = 1.0
"""How often Kafka looks for transactions beyond their time-out; 10 by default."""
MARGIN_SECONDS = 5.0
"""For ending one on all its partitions, on a busy machine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    extra = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": str(int(SCAN_SECONDS * 1000))}
    with Cluster(tmp_path_factory.mktemp("cluster"), extra=extra) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def quiet() -> None:
    """As in services: aiokafka tells of every attempt at a broker that is away."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


@pytest.fixture
def trio(cluster: Cluster) -> Iterator[Kafka]:
    """Kafka on all three nodes, and all of them well again afterwards."""
    yield Kafka(KafkaSettings(bootstrap=cluster.bootstrap, prefix=f"t{time.time_ns()}", session_timeout_seconds=6))
    cluster.heal()


class Haul:
    """Prompts on their way through a generator and a sink."""

    def __init__(self, kafka: Kafka, engine: FakeEngine, generator: Generator, root: Path) -> None:
        self.kafka, self.engine, self.generator, self._root = kafka, engine, generator, root
        self.prompts: list[Prompt] = []
        self.health: list[Health] = []

    async def ask(self, count: int) -> None:
        """Publish so many more."""
        more = [make_prompt(len(self.prompts) + number) for number in range(count)]
        self.prompts += more
        async with asyncio.timeout(120):
            await publish(self.kafka, more, batch=50)

    async def generated(self, count: int) -> None:
        """Until so many generations have ended."""
        await eventually(lambda: len(self.engine.ended) >= count, 120)

    async def held_up(self) -> None:
        """Until nothing is in flight any more, because nothing can be published."""
        await eventually(lambda: len(self.engine.ended) == len(self.engine.started), 60)

    def published(self) -> float | None:
        """Outcomes that Kafka has acknowledged. It need not tell by itself: a new leader gives no end of its log before
        the replicas it is to have have followed."""
        return self.generator.metrics.registry.get_sample_value("tokenhaul_records_out_total", {"stage": "generator"})

    async def landed(self) -> None:
        """Until every prompt is a row; each exactly once, as the files say."""

        async def rows() -> bool:
            report = await asyncio.to_thread(verify, self._root) if any(self._root.rglob("*.parquet")) else None
            assert report is None or report.ok, report.text()
            return report is not None and report.rows >= len(self.prompts)

        await eventually(rows, 150)
        report = verify(self._root)
        assert (report.rows, report.failures) == (len(self.prompts), {})

    def assert_paid_once(self, disturbances: int = 1) -> None:
        """No more was generated again than was in flight, or ended between two commits, at each disturbance: had it
        come at the busiest moment in the engine's log."""
        ends = self.engine.ended_at
        span = 2 * COMMIT_SECONDS  # a commit takes its time, too
        between = max(bisect_right(ends, end + span) - number for number, end in enumerate(ends))
        bound = disturbances * (2 * WINDOW + between)  # the generator holds as many again as it has asked for
        assert bound < len(self.prompts) / 3, "so many may be repeated that it says little"
        again = sum(count - 1 for count in asked(self.engine).values())
        print(f"{again} of {len(self.prompts)} generated again, at most {bound} are accounted for")
        assert again <= bound


@asynccontextmanager
async def hauling(kafka: Kafka, root: Path, replication: int = 3) -> AsyncIterator[Haul]:
    """A running pipeline over fresh topics."""
    dataset = topics.new_dataset("test", MODEL, PARTITIONS)
    await topics.create(kafka, dataset, replication=replication, min_isr=max(1, replication - 1))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(FakeModel(FACTS, latency=lambda _: LATENCY)))
        generator = make_generator(kafka, engine, window=str(WINDOW))
        haul = Haul(kafka, engine, generator, root)
        environ = {
            "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
            "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
            "TOKENHAUL_KAFKA_SESSION_TIMEOUT_SECONDS": "6",
            "TOKENHAUL_SINK_ROOT": str(root),
            "TOKENHAUL_SINK_MAX_AGE_SECONDS": "1",
        }
        for service in (generator, sink.make(environ)):
            context, _ = await stack.enter_async_context(running(service))
            haul.health.append(context.health)
        yield haul


async def leader(kafka: Kafka, topic: str, partition: int) -> int:
    async with kafka.started(kafka.admin) as admin:
        (described,) = await kafka.patiently(lambda: admin.describe_topics([topic]))
    return next(int(p["leader"]) for p in described["partitions"] if p["partition"] == partition)


async def aside(work: Callable[[], object]) -> None:
    await asyncio.to_thread(work)


async def test_the_leader_is_killed(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(150)
        await haul.generated(50)
        node = await leader(trio, trio.topics.sequences, 0)
        cluster.kill(node)
        await haul.ask(150)
        await haul.landed()
    haul.assert_paid_once()


async def test_the_in_sync_replicas_are_lost_and_come_back(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(300)
        await haul.generated(50)
        cluster.kill(1)
        cluster.kill(2)
        await haul.held_up()
        cluster.start(1)
        cluster.start(2)
        await haul.ask(50)
        await haul.landed()
    haul.assert_paid_once(2)


async def test_all_brokers_die_at_once(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(300)
        await haul.generated(100)
        for node in cluster.nodes:
            cluster.kill(node)
        await eventually(lambda: all("does not answer" in health.not_ready for health in haul.health), 60)
        for node in cluster.nodes:
            cluster.start(node)
        await eventually(lambda: not any(health.not_ready for health in haul.health), 120)
        await haul.ask(50)
        await haul.landed()
    haul.assert_paid_once(2)


async def test_partitions_are_moved(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(150)
        await haul.generated(50)
        moved = {
            (topic, partition): [node % 3 + 1, (node + 1) % 3 + 1]
            for topic in (trio.topics.prompts, trio.topics.sequences)
            for partition, node in [(number, await leader(trio, topic, number)) for number in range(PARTITIONS)]
        }
        await aside(lambda: cluster.move(moved))
        await haul.ask(150)
        await haul.landed()
        for (topic, partition), nodes in moved.items():
            await eventually(lambda t=topic, p=partition, n=nodes: leads(trio, t, p, n), 60)
    haul.assert_paid_once()


async def leads(kafka: Kafka, topic: str, partition: int, nodes: list[int]) -> bool:
    return await leader(kafka, topic, partition) in nodes


async def test_a_slow_broker(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(100)
        await haul.generated(20)
        node = await leader(trio, trio.topics.sequences, 1)
        for _ in range(6):  # the beat of the fault, not a wait for anything
            cluster.freeze(node)
            await asyncio.sleep(0.7)
            cluster.thaw(node)
            await haul.ask(20)
        await haul.landed()
    haul.assert_paid_once()


async def test_a_frozen_broker_is_left_behind(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(150)
        await haul.generated(50)
        node = await leader(trio, trio.topics.prompts, 0)
        cluster.freeze(node)
        await eventually(lambda: elsewhere(cluster, trio, node), 60)
        await haul.ask(150)
        cluster.thaw(node)
        await haul.landed()
    haul.assert_paid_once(2)


async def elsewhere(cluster: Cluster, kafka: Kafka, node: int) -> bool:
    awake = KafkaSettings(
        bootstrap=[a for n, a in zip(cluster.nodes, cluster.bootstrap, strict=True) if n != node],
        prefix=kafka.settings.prefix,
    )
    return await leader(Kafka(awake), kafka.topics.prompts, 0) != node


async def test_a_coordinator_dies_in_a_transaction(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    """What ingest left open when it died holds readers up for no longer than its time-out."""
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(50)
        await haul.landed()
        producer = await trio.start(lambda: trio.producer(transactional_id=f"{trio.settings.prefix}.other"))
        await producer.begin_transaction()
        lost = make_prompt(10_000)
        began = time.monotonic()
        await producer.send_and_wait(trio.topics.prompts, Encoder().encode(lost), partition=0)
        coordinator = producer._txn_manager and producer._sender._coordinators
        cluster.kill(next(iter(coordinator.values())))
        partition = TopicPartition(trio.topics.prompts, 0)
        async with trio.started(lambda: trio.consumer(None, "read_uncommitted")) as dirty:
            end = (await dirty.end_offsets([partition]))[partition]
        async with trio.started(lambda: trio.consumer(None, "read_committed")) as clean:

            async def stable() -> bool:
                return bool((await clean.end_offsets([partition]))[partition] >= end)

            await eventually(stable, 90)
        held_up = time.monotonic() - began
        await haul.ask(50)
        await haul.landed()
        await asyncio.wait([asyncio.create_task(producer.stop())], timeout=10)
    print(f"readers were held up for {held_up:.1f} s")
    assert held_up < TRANSACTION_SECONDS + SCAN_SECONDS + MARGIN_SECONDS
    assert lost.prompt_ids not in [list(ids) for ids in asked(haul.engine)], "what was not committed was generated"


async def test_partitions_without_a_leader_until_batches_expire(
    cluster: Cluster, trio: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Kafka.producer

    def impatient(self: Kafka, *, transactional_id: str | None = None) -> object:
        made = producer(self, transactional_id=transactional_id)
        made._sender._message_accumulator._batch_ttl = 3.0
        return made

    monkeypatch.setattr(Kafka, "producer", impatient)
    async with hauling(trio, tmp_path, replication=1) as haul:
        await haul.ask(300)
        await haul.generated(50)
        node = await leader(trio, trio.topics.sequences, 0)
        cluster.kill(node)
        replaced = haul.generator.metrics.producers_replaced
        await eventually(lambda: replaced._value.get() > 0, 60)
        cluster.start(node)
        await haul.landed()
    haul.assert_paid_once(2)


async def test_more_in_sync_replicas_are_demanded_than_there_are(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    """A majority lives, so that Kafka answers everybody: it only refuses to take outcomes."""
    async with hauling(trio, tmp_path) as haul:
        await haul.ask(300)
        await haul.generated(50)
        cluster.kill(2)
        await configure(trio, trio.topics.sequences, min_insync_replicas="3")
        await eventually(lambda: in_sync(trio, trio.topics.sequences, 2), 60)
        await haul.held_up()
        published = haul.published()
        plain = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, acks="all", request_timeout_ms=3000)
        async with trio.started(lambda: plain) as producer:
            with pytest.raises((NotEnoughReplicasError, KafkaTimeoutError)):
                await producer.send_and_wait(trio.topics.sequences, b"", partition=0)
        await haul.held_up()
        assert haul.published() == published
        cluster.start(2)
        await haul.ask(50)
        await haul.landed()
    haul.assert_paid_once(2)


async def in_sync(kafka: Kafka, topic: str, count: int) -> bool:
    """Whether each partition has so many in-sync replicas."""
    async with kafka.started(kafka.admin) as admin:
        (described,) = await kafka.patiently(lambda: admin.describe_topics([topic]))
    return all(len(partition["isr"]) == count for partition in described["partitions"])


def test_ingest_waits_for_the_in_sync_replicas_that_are_demanded(cluster: Cluster, trio: Kafka, tmp_path: Path) -> None:
    asyncio.run(topics.create(trio, topics.new_dataset("test", MODEL, PARTITIONS), replication=3, min_isr=2))
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Say {number} in words."}) + "\n" for number in range(200)]
    file.write_text("".join(lines[:100]))
    ingest = Ingest(trio, tmp_path)
    ingest.declare("name: numbers, files: [prompts.jsonl]")
    ingest.start()
    wait_for(lambda: len(ingest.prompts()) == 100, 90)
    wait_for(ingest.ready, 60)
    cluster.kill(2)
    asyncio.run(configure(trio, trio.topics.prompts, min_insync_replicas="3"))
    with file.open("a") as out:
        out.writelines(lines[100:])
    wait_for(lambda: not ingest.ready(), 90)
    # How many prompts are there now cannot be asked: a new leader tells no end of its log without its replicas.
    cluster.start(2)
    wait_for(lambda: len(ingest.prompts()) >= 200, 120)
    wait_for(ingest.ready, 60)
    assert Counter(Counter(prompt.source_ref.row for prompt in ingest.prompts()).values()) == {1: 200}
    ingest.told("finishing what is in flight")  # it was the same process all along
