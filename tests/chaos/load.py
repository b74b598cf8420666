"""`make chaos-load`: many prompts through three service processes, and a burst on the topic; memory stays flat.

    python -m tests.chaos.load --prompts 1000000 --burst 100000 [--keep FOLDER]

Real Kafka (one node), fake engines that answer at once. Prints what each service held in memory at each tenth of the
way. Exit status 0: every prompt is one row, and no service that worked for more than two minutes grew by more than its
index of ids may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from schemas import ids
from services.kernel.codec import Encoder, schema_of
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.local.kafka import free_ports
from services.local.processes import Child, end
from services.local.run import LOCAL_TOKENIZER
from services.sink.verify import verify
from tests.support.cluster import Cluster
from tests.support.processes import TOKENHAUL
from tests.support.stream import make_prompt

SERVICES = ("ingest", "generate", "sink")
PARTITIONS = 6
MODEL = "fake"
_ENGINES = 2
_ID_BYTES = {"ingest": 24, "generate": 0, "sink": 24}  # of its index of seen ids, per record
_GROWTH = 1.25  # of what else a service holds, over the second half: allocators are no straight line
_BURST_RATE = 50_000  # records/s
_LEAST_SAMPLES = 200  # twice a second; a shorter run is all warming up
_MIB = 1024 * 1024


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1_000_000, help="lines for ingest (default %(default)s)")
    parser.add_argument("--burst", type=int, default=100_000, help="records put on the topic at once (%(default)s)")
    parser.add_argument("--keep", type=Path, default=None, help="folder that is kept")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="tokenhaul-load-"))
    load = Load(folder)
    problems = load.run(arguments.prompts, arguments.burst)
    problems += [str(memory) for memory in load.memory if not memory.flat]
    print(*problems, sep="\n")
    if not problems and arguments.keep is None:
        shutil.rmtree(folder)
    return 1 if problems else 0


class Memory(msgspec.Struct, frozen=True):
    """Bytes a service held, the most in each tenth of its way, and what ids may have added over the second half."""

    service: str
    tenths: list[int]
    ids: int

    @property
    def early(self) -> int:
        """The most in the first half."""
        return max(self.tenths[:5])

    @property
    def late(self) -> int:
        """The most at the end, without what ids may have added since."""
        return self.tenths[-1] - self.ids

    @property
    def flat(self) -> bool:
        """Whether it grew by no more than an allocator may."""
        return self.late <= self.early * _GROWTH

    def __str__(self) -> str:
        verdict = "" if self.flat else f" (it grew by more than ids and {_GROWTH - 1:.0%})"
        return f"{self.service}: MiB at each tenth: {' '.join(str(size // _MIB) for size in self.tenths)}{verdict}"


class Load:
    """One run in `folder`; `memory` of its services, where it took long enough to say."""

    def __init__(self, folder: Path) -> None:
        self.memory: list[Memory] = []
        self._folder, self._root = folder, folder / "out"
        self._environ = dict(os.environ)

    def run(self, prompts: int, burst: int) -> list[str]:
        """What was lost or ended as it must not."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "prompts.jsonl").open("w") as file:
            for number in range(prompts):
                file.write(json.dumps({"prompt": f"Say {number} in other words."}) + "\n")
        (self._folder / "sources.yaml").write_text("sources: [{name: s, files: [prompts.jsonl], max_new_tokens: 64}]")
        with Cluster(self._folder / "kafka", nodes=1) as cluster, self._engines() as engines:
            kafka = Kafka(KafkaSettings(bootstrap=cluster.bootstrap, prefix="load"))
            self._environ |= self._settings(kafka)
            create = ("topics", "create", "--dataset", "load", "--model", MODEL, "--partitions", str(PARTITIONS))
            subprocess.run([*TOKENHAUL, *create, "--replication", "1", "--min-isr", "1"], env=self._environ, check=True)
            problems = self._haul(kafka, engines, prompts, burst)
        report = verify(self._root)
        if not report.ok or report.rows != prompts + burst or report.failures:
            problems.append(f"{report.rows} rows of {prompts + burst} prompts: {report.text()}")
        return problems

    def _haul(self, kafka: Kafka, engines: list[Child], prompts: int, burst: int) -> list[str]:
        """Start the services, add the burst to their work when they are at it, wait until they end; what went wrong."""
        began = time.monotonic()
        children = {service: self._start(service) for service in SERVICES}
        sizes: dict[str, list[int]] = {service: [] for service in SERVICES}
        to_come, problems = burst, list[str]()
        try:
            while not all(child.done for child in children.values()):
                for service, child in children.items():
                    if child.status is None:
                        sizes[service].append(_resident(child.pid))
                for child in (*children.values(), *engines):
                    if child.status:
                        return [f"{child.name} ended with {child.status}:\n{child.tail()}"]
                if to_come and any(self._root.rglob("*.parquet")):
                    rate, to_come = asyncio.run(_burst(kafka, burst)), 0
                    print(f"burst: {burst} records at {rate:,.0f} records/s", flush=True)
                    if rate < _BURST_RATE:
                        problems.append(f"the burst was put at {rate:,.0f} records/s, of {_BURST_RATE:,} it is one")
                time.sleep(0.5)
        finally:
            end(list(children.values()), 15)
        seconds = time.monotonic() - began
        records = prompts + burst
        print(f"{records} records in {seconds:.0f} s, {records / seconds:,.0f} records/s", flush=True)
        for service in SERVICES:
            memory = Memory(service, _tenths(sizes[service]), _ID_BYTES[service] * records // 2)
            print(memory, flush=True)
            if len(sizes[service]) >= _LEAST_SAMPLES:
                self.memory.append(memory)
        return problems

    def _start(self, service: str) -> Child:
        environ = self._environ | {"TOKENHAUL_METRICS_PORT": str(free_ports(1)[0])}
        return Child(service, [*TOKENHAUL, service, "--until-idle"], self._folder / f"{service}.log", environ)

    @contextmanager
    def _engines(self) -> Iterator[list[Child]]:
        ports = free_ports(_ENGINES)
        command = [sys.executable, "-m", "tests.support.fake_engine", "--slots", "256", "--tokenizer", LOCAL_TOKENIZER]
        children = [
            Child("engine", [*map(str, command), "--port", str(port)], self._folder / f"engine-{port}.log", os.environ)
            for port in ports
        ]
        try:
            self._environ["TOKENHAUL_GENERATOR_ENGINES"] = ",".join(f"http://127.0.0.1:{port}" for port in ports)
            yield children
        finally:
            end(children, 15)

    def _settings(self, kafka: Kafka) -> dict[str, str]:
        return {
            "TOKENHAUL_RUN_ID": uuid.uuid4().hex,
            "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
            "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
            "TOKENHAUL_INGEST_SOURCES_FILE": str(self._folder / "sources.yaml"),
            "TOKENHAUL_INGEST_TOKENIZER": str(LOCAL_TOKENIZER),
            "TOKENHAUL_SINK_ROOT": str(self._root),
            "TOKENHAUL_SINK_MAX_AGE_SECONDS": "10",
        }


def _tenths(sizes: list[int]) -> list[int]:
    return [max(sizes[len(sizes) * n // 10 : max(1, len(sizes) * (n + 1) // 10)], default=0) for n in range(10)]


def _resident(pid: int) -> int:
    """Bytes of memory the process holds; 0 when it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


async def _burst(kafka: Kafka, count: int) -> float:
    """Put prompts that are not of any file on the topic, as fast as Kafka takes them; records/s, acknowledged.

    Batches are made beforehand: it is the topic and its readers that are to meet the burst, not this producer."""
    encoder = Encoder()
    async with kafka.started(lambda: kafka.producer(transactional_id="load.burst")) as producer:
        batches: list[tuple[int, Any]] = []
        open_: dict[int, Any] = {}
        for number in range(count):
            prompt = make_prompt(number, prompt_ids=[5, number % 40_000, number // 40_000, 7])
            partition = ids.partition(prompt.id, PARTITIONS)
            record = {"key": None, "value": encoder.encode(prompt), "timestamp": None}
            headers = [("schema", schema_of(prompt)), ("id", prompt.id)]
            builder = open_.setdefault(partition, producer.create_batch())
            if builder.append(**record, headers=headers) is None:  # it is full
                batches.append((partition, builder))
                open_[partition] = builder = producer.create_batch()
                builder.append(**record, headers=headers)
        batches += open_.items()
        began = time.monotonic()
        async with producer.transaction():
            sent = []
            for partition, builder in batches:
                builder.close()
                sent.append(await producer.send_batch(builder, kafka.topics.prompts, partition=partition))
            await asyncio.gather(*sent)
        return count / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
