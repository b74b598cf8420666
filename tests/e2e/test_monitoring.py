"""The pipeline under a real Prometheus: every panel has data, alerts are silent in health, and those that page ring."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from aiokafka.admin import RecordsToDelete

from services.kernel import topics
from services.kernel.groups import partitions_of
from services.kernel.kafka import Kafka
from services.local.kafka import free_ports
from services.local.processes import Child
from services.local.run import LOCAL_TOKENIZER
from tests.k8s.dashboards import DASHBOARDS, alerts, queries
from tests.k8s.manifests import needs
from tests.support.processes import TOKENHAUL, alive, fake_engine, kill, wait_for
from tests.support.prometheus import Prometheus, prometheus

pytestmark = pytest.mark.long

PROMPTS = 8000
PAGES = {rule["alert"] for rule in alerts() if rule["labels"]["severity"] == "page"}
SECONDS = 60.0


class Pipeline:
    """Three service processes, a fake engine and a Prometheus."""

    def __init__(self, kafka: Kafka, folder: Path, engine: str) -> None:
        self.kafka, self.folder, self.engine = kafka, folder, engine
        self.root = folder / "out"
        self.ports = dict(zip(("ingest", "generate", "sink"), free_ports(3), strict=True))
        self.running: dict[str, Child] = {}
        self.written = 0

    def start(self, name: str) -> None:
        """A service as on Kubernetes, in a hurry."""
        settings = {
            "TOKENHAUL_METRICS_PORT": str(self.ports[name]),
            "TOKENHAUL_KAFKA_BOOTSTRAP": self.kafka.address,
            "TOKENHAUL_KAFKA_PREFIX": self.kafka.settings.prefix,
            "TOKENHAUL_KAFKA_INSTANCE": f"{name}-0",
            "TOKENHAUL_INGEST_SOURCES_FILE": str(self.folder / "sources.yaml"),
            "TOKENHAUL_INGEST_TOKENIZER": str(LOCAL_TOKENIZER),
            "TOKENHAUL_INGEST_BATCH_RECORDS": "64",
            "TOKENHAUL_INGEST_SCAN_SECONDS": "1",
            "TOKENHAUL_GENERATOR_ENGINES": self.engine,
            "TOKENHAUL_GENERATOR_WINDOW": "16",
            "TOKENHAUL_SINK_ROOT": str(self.root),
            "TOKENHAUL_SINK_MAX_AGE_SECONDS": "3",
            "TOKENHAUL_SINK_ON_GAP": "continue",
        }
        self.running[name] = Child(name, [*TOKENHAUL, name], self.folder / f"{name}.log", os.environ | settings)
        wait_for(partial(self._ready, name), SECONDS)

    def _ready(self, name: str) -> bool:
        assert alive(self.running[name].pid), self.running[name].tail()
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[name]}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def write(self) -> None:
        """One more prompt."""
        self.written += 1
        with (self.folder / "prompts.jsonl").open("a") as out:
            out.write(json.dumps({"prompt": f"Say {PROMPTS + self.written} in words."}) + "\n")

    def end(self, name: str) -> None:
        """kill -9."""
        kill(self.running[name].pid)
        self.running[name].wait_or_kill(0.0)

    def engine_ready(self, ready: bool) -> None:
        """Let the engine take work, or not."""
        httpx.post(f"{self.engine}/fake/ready", content=json.dumps(ready)).raise_for_status()


def write_sources(folder: Path) -> None:
    lines = [json.dumps({"prompt": f"Say {number} in words."}) for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join([*lines, lines[0], '{"messages": 1}']) + "\n")
    (folder / "sources.yaml").write_text("sources: [{name: numbers, files: [prompts.jsonl], max_new_tokens: 64}]")


@pytest.fixture
def monitored(kafka: Kafka, tmp_path: Path) -> Iterator[tuple[Pipeline, Prometheus]]:
    """A pipeline in health, with a backlog of minutes."""
    needs("prometheus")
    asyncio.run(topics.create(kafka, topics.new_dataset("test", "fake", 4), replication=1, min_isr=1))
    write_sources(tmp_path)
    with ExitStack() as stack:
        url, _ = stack.enter_context(fake_engine(tmp_path, "--slots", "8", "--latency", "0.2"))
        made = Pipeline(kafka, tmp_path, url)
        targets = {"sglang": url.removeprefix("http://")}
        for name, job in (("sink", "sink"), ("generate", "generator"), ("ingest", "ingest")):
            made.start(name)
            stack.callback(made.end, name)
            targets[f"tokenhaul-{job}"] = f"127.0.0.1:{made.ports[name]}"
        yield made, stack.enter_context(prometheus(tmp_path, targets))


def has_data(values: list[float]) -> bool:
    return any(not math.isnan(value) for value in values)


def test_no_panel_is_empty_and_pages_ring_in_their_fault_alone(
    monitored: tuple[Pipeline, Prometheus], kafka: Kafka
) -> None:
    pipeline, asked = monitored
    waiting = {
        (name, query.panel): [q.expr for q in queries(name, "5s") if q.panel == query.panel]
        for name in DASHBOARDS
        for query in queries(name, "5s")
    }

    def all_have_data() -> bool:
        pipeline.write()  # a rate needs something that goes on
        for panel, exprs in list(waiting.items()):
            if any(has_data(asked.query(expr)) for expr in exprs):
                del waiting[panel]
        return not waiting

    try:
        wait_for(all_have_data, SECONDS)
    except AssertionError:
        raise AssertionError(f"panels without data: {sorted(waiting)}") from None
    assert asked.firing() == set()
    assert asked.rule_errors() == []

    rang: set[str] = set()

    def rings(*names: str) -> bool:
        rang.update(asked.firing())
        return set(names) <= asked.firing()

    def silent() -> bool:
        return not asked.firing() & PAGES

    pipeline.engine_ready(False)
    wait_for(partial(rings, "TokenhaulNoEngineReady", "TokenhaulNotProgressing"), SECONDS)
    pipeline.engine_ready(True)
    wait_for(silent, SECONDS)

    temporary = pipeline.root / ".tmp"  # where every shard is written first
    temporary.rename(pipeline.root / ".away")
    temporary.write_text("")
    wait_for(partial(rings, "TokenhaulSinkStalled"), SECONDS)
    temporary.unlink()
    (pipeline.root / ".away").rename(temporary)
    wait_for(silent, SECONDS)
    assert rang & PAGES == PAGES - {"TokenhaulServiceDown", "TokenhaulOffsetGap"}, "a page rang in another's fault"

    pipeline.end("sink")
    wait_for(partial(rings, "TokenhaulServiceDown"), SECONDS)
    asyncio.run(_delete_outcomes(kafka))
    pipeline.start("sink")
    wait_for(partial(rings, "TokenhaulOffsetGap"), SECONDS)
    assert rang >= PAGES


async def _delete_outcomes(kafka: Kafka) -> None:
    """What retention would do to a sink that was away for too long."""
    async with (
        kafka.started(kafka.admin) as admin,
        kafka.started(lambda: kafka.consumer(None, "read_committed")) as reader,
    ):
        partitions = await partitions_of(admin, kafka.topics.sequences)
        ends = await reader.end_offsets(partitions)
        await admin.delete_records({tp: RecordsToDelete(before_offset=end) for tp, end in ends.items()})
