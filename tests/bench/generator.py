"""How little a record costs the generator, and how full it keeps engines: `make bench-generator`.

Everything is measured in one run on this machine, beside the ways people do it without a queue: an OpenAI client in a
pool of threads, and a bare aiohttp loop that checks nothing and writes nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.local.kafka import LocalKafka, free_ports
from services.local.processes import Child, end
from tests.bench.table import Line, machine, median_line, show, write
from tests.support.processes import TOKENHAUL, wait_for
from tests.support.stream import PARTITIONS, create_topics, make_prompt, publish

PROMPT_IDS = 300
INSTANT_RECORDS = 12_000
ROUNDS = 9
WARM_UP_SECONDS = 15.0
WATCH_SECONDS = 40.0
ROOT = Path(__file__).parents[2]
_IN_USE, _WAITING = 0.95, 0.25
"""What must hold while capacity changes."""


def main() -> None:
    """All of it: more sizes of engines, and capacity that changes. Exit status 1 when a line falls short."""
    with tempfile.TemporaryDirectory() as name, kafka_node(folder := Path(name)) as address:
        lines = instant(address, folder)
        for places in (64, 256):
            for median, sigma in ((0.4, 1.2), (2.0, 1.16)):
                lines += occupancy(address, folder, 1, 1, places, median, sigma)
        lines += occupancy(address, folder, 2, 3, 64, 0.4, 1.2)
        for window in (0, 22, 43):
            lines += changing(address, folder, window)
    show(lines, "generator")
    write(lines, machine(), Path("out/bench-generator.json"))
    sys.exit(any(line.passed is False for line in lines))


def measure() -> list[Line]:
    """The budgets of the design alone."""
    with tempfile.TemporaryDirectory() as name, kafka_node(folder := Path(name)) as address:
        return [
            *instant(address, folder),
            *occupancy(address, folder, 1, 1, 64, 0.4, 1.2),
            *occupancy(address, folder, 2, 3, 64, 0.4, 1.2),
        ]


def instant(address: str, folder: Path) -> list[Line]:
    """CPU and records per second against an engine that answers at once, 512 in flight. In turns with the references:
    a pool of threads is at times a third slower for a whole run."""
    rounds = [
        (generator_rate(address, folder), reference("aiohttp", folder), reference("openai", folder))
        for _ in range(ROUNDS)
    ]
    ours, *references = zip(*rounds, strict=True)
    cpu, rate = ([1000 * one for one, _ in ours], [one for _, one in ours])
    lines = [
        Line(name="generator, CPU a record", value=statistics.median(cpu), unit="ms", at_most=0.6),
        Line(name="generator, records", value=statistics.median(rate), unit="/s", at_least=1500),
    ]
    bounds: dict[tuple[str, str], dict[str, float]] = {
        ("aiohttp", "CPU a record"): {"at_most": 4.0},
        ("openai", "records"): {"at_least": 20.0},
    }
    named = (("aiohttp", "bare aiohttp loop"), ("openai", "OpenAI clients in 64 threads"))
    for (name, who), theirs in zip(named, references, strict=True):
        for what, values, others, unit in (
            ("CPU a record", cpu, [1000 * one for one, _ in theirs], "ms"),
            ("records", rate, [one for _, one in theirs], "/s"),
        ):
            lines.append(
                median_line(
                    values, others, name=f"{what} beside {name}", unit=unit, reference_name=who, bounds="ratio",
                    **bounds.get((name, what), {}),
                )
            )  # fmt: skip
    return lines


def generator_rate(address: str, folder: Path, processes: int = 1, partitions: int = PARTITIONS) -> tuple[float, float]:
    """(CPU seconds a record, records a second) of so many processes together, Kafka in to Kafka out."""
    records = INSTANT_RECORDS * processes
    kafka = asyncio.run(topic_with_prompts(address, records, partitions))
    with engine(folder) as url, running(kafka, [url], processes, folder, window=512) as ports:
        wait_for(lambda: so_far(ports)[2] > records * 0.2, 120)
        first = so_far(ports)
        wait_for(lambda: so_far(ports)[2] > records * 0.9, 120)
        last = so_far(ports)
    seconds, cpu, done = (after - before for before, after in zip(first, last, strict=True))
    return cpu / done, done / seconds


def so_far(ports: list[int]) -> tuple[float, float, float]:
    """(now in seconds, CPU seconds, records done) of generators together."""
    metrics = ("process_cpu_seconds_total", "tokenhaul_records_out_total")
    cpu, records = (sum(read(port, metric) for port in ports) for metric in metrics)
    return time.monotonic(), cpu, records


def occupancy(
    address: str, folder: Path, engines: int, generators: int, places: int, median: float, sigma: float
) -> list[Line]:
    """The share of places in use while the backlog lasts, and how much waits for one."""
    mean = median * 2.72 ** (sigma * sigma / 2)
    records = int(engines * places / mean * (WARM_UP_SECONDS + WATCH_SECONDS + 20))
    kafka = asyncio.run(topic_with_prompts(address, records))
    with ExitStack() as stack:
        urls = [
            stack.enter_context(engine(folder, "--places", places, "--median", median, "--sigma", sigma))
            for _ in range(engines)
        ]
        stack.enter_context(running(kafka, urls, generators, folder))
        in_use, waiting = watch(urls, [places] * engines, WATCH_SECONDS)
    case = f"{generators} generators, {engines} engines of {places} places, log-normal {median} s sigma {sigma}"
    return [
        Line(name=f"{case}: in use", value=in_use, unit="of the places", at_least=0.98 if generators == 1 else 0.95),
        Line(name=f"{case}: waiting", value=waiting, unit="of those running", at_most=0.1),
    ]


def changing(address: str, folder: Path, window: int) -> list[Line]:
    """Capacity that nobody told three generators of two engines about, halved and then doubled twice over. A fixed
    window is right for one capacity at most: it passes when it misses one of the two lines."""
    kafka = asyncio.run(topic_with_prompts(address, 18_000))
    case = "window following" if not window else f"window fixed at {window}"
    lines: list[Line] = []
    used: list[float] = []
    crowded: list[float] = []
    with ExitStack() as stack:
        urls = [stack.enter_context(engine(folder, "--places", 64, "--median", 0.4, "--sigma", 1.2)) for _ in range(2)]
        stack.enter_context(running(kafka, urls, 3, folder, window=window))
        for places in (64, 32, 128):
            for url in urls:
                urllib.request.urlopen(f"{url}/places", data=str(places).encode()).close()
            in_use, waiting = watch(urls, [places] * 2, 20.0, warm_up=WARM_UP_SECONDS if places == 64 else 0.0)
            used.append(in_use)
            crowded.append(waiting)
            lines.append(Line(name=f"{case}, {places} places: in use", value=in_use, unit="of the places"))
            lines.append(Line(name=f"{case}, {places} places: waiting", value=waiting, unit="of those running"))
    in_use, waiting = statistics.mean(used), max(crowded)
    if window:
        held = (in_use >= _IN_USE) + (waiting <= _WAITING)
        lines.append(Line(name=f"{case}: lines held", value=held, unit="of 2", at_most=1))
        return lines
    return [
        *lines,
        Line(name=f"{case}, mean in use", value=in_use, unit="of the places", at_least=_IN_USE),
        Line(name=f"{case}, most waiting", value=waiting, unit="of those running", at_most=_WAITING),
    ]


def watch(urls: list[str], places: list[int], seconds: float, warm_up: float = WARM_UP_SECONDS) -> tuple[float, float]:
    """(share of places in use, waiting per running) over `seconds`, sampled ten times a second."""
    time.sleep(warm_up)
    running: list[int] = []
    waiting: list[int] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for url in urls:
            with urllib.request.urlopen(f"{url}/v1/loads") as answer:
                load = msgspec.json.decode(answer.read())["loads"][0]
            running.append(load["num_running_reqs"])
            waiting.append(load["num_waiting_reqs"])
        time.sleep(0.1)
    return sum(running) / (len(running) / len(places) * sum(places)), sum(waiting) / max(1, sum(running))


@contextmanager
def kafka_node(folder: Path) -> Iterator[str]:
    """host:port of a Kafka of our own."""
    node = LocalKafka(folder / "kafka")
    node.prepare()
    child = Child("kafka", node.command, folder / "kafka.log", os.environ)
    try:
        wait_for(node.listens, 60)
        yield node.bootstrap
    finally:
        end([child], 15)


async def topic_with_prompts(address: str, count: int, partitions: int = PARTITIONS) -> Kafka:
    """A dataset of its own with `count` prompts of 300 ids."""
    kafka = Kafka(KafkaSettings(bootstrap=[address], prefix=f"bench-{time.time_ns()}"))
    await create_topics(kafka, partitions)
    prompts = (
        make_prompt(
            number,
            prompt_ids=[1, number % 49_000, number // 49_000, *range(100, 100 + PROMPT_IDS - 3)],
            max_new_tokens=512,
        )
        for number in range(count)
    )
    await publish(kafka, list(prompts), 1000, partitions)
    return kafka


@contextmanager
def engine(folder: Path, *arguments: object) -> Iterator[str]:
    """The URL of a running tests.bench.engine."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.bench.engine", "--port", str(port), *map(str, arguments)]
    child = Child("engine", command, folder / f"engine-{port}.log", os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: b"url" in child.log.read_bytes(), 30)
        yield f"http://127.0.0.1:{port}"
    finally:
        end([child], 5)


@contextmanager
def running(kafka: Kafka, urls: list[str], count: int, folder: Path, window: int = 0) -> Iterator[list[int]]:
    """`count` generators at work; the ports of their metrics."""
    ports = free_ports(count)
    children = [start_generator(kafka, urls, folder, port, TOKENHAUL_GENERATOR_WINDOW=str(window)) for port in ports]
    try:
        yield ports
    finally:
        end(children, 10)


def start_generator(kafka: Kafka, urls: list[str], folder: Path, port: int, **environ: str) -> Child:
    """A generator whose metrics are at `port`."""
    settings = {
        "PYTHONPATH": str(ROOT),
        "TOKENHAUL_LOG_LEVEL": "warning",
        "TOKENHAUL_METRICS_PORT": str(port),
        "TOKENHAUL_DRAIN_SECONDS": "0",
        "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
        "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
        "TOKENHAUL_GENERATOR_ENGINES": ",".join(urls),
    }
    log = folder / f"generator-{port}.log"
    return Child(f"generator {port}", [*TOKENHAUL, "generate"], log, os.environ | settings | environ)


def read(port: int, metric: str) -> float:
    """The sum of a metric's series; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return 0.0
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == metric)


def reference(name: str, folder: Path) -> tuple[float, float]:
    """(CPU seconds a row, rows a second) of another client against the same engine."""
    with engine(folder) as url:
        command = [sys.executable, "-m", "tests.bench.references", name, url]
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
    cpu, rate = map(float, result.stdout.split()[-2:])
    return cpu, rate


if __name__ == "__main__":
    main()
