"""More than one generator process, and one with as much in flight as it is given: `make bench-long BENCH=processes`.

What docs/scaling.md counts pods with: a record costs as much in each of several processes as in one alone, and a record
that is in flight costs memory.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from tests.bench.generator import engine, generator_rate, kafka_node, read, running, so_far, topic_with_prompts, watch
from tests.bench.table import Line

PROCESSES = (1, 2, 4)
ROUNDS = 3
IN_FLIGHT = (512, 4096)
_MEDIAN, _SIGMA = 2.0, 1.16
_WATCH_SECONDS = 30.0


def measure_long() -> list[Line]:
    """About six minutes."""
    with tempfile.TemporaryDirectory() as name, kafka_node(folder := Path(name)) as address:
        return [*several(address, folder), *wide(address, folder)]


def several(address: str, folder: Path) -> list[Line]:
    """So many processes on one engine that answers at once, in turns. Engine and Kafka are on the same cores."""
    rounds = [[generator_rate(address, folder, count) for count in PROCESSES] for _ in range(ROUNDS)]
    lines: list[Line] = []
    for count, measured in zip(PROCESSES, zip(*rounds, strict=True), strict=True):
        cpu, rate = (statistics.median(figures) for figures in zip(*measured, strict=True))
        name = f"{count} generator processes"
        alone = lines[0].value if lines else None
        lines.append(
            Line(name=f"{name}, CPU a record", value=1000 * cpu, unit="ms", reference=alone, reference_name="one")
        )
        lines.append(Line(name=f"{name}, records together", value=rate, unit="/s"))
    return lines


def wide(address: str, folder: Path) -> list[Line]:
    """One process that keeps as many places busy as one pod is given in docs/scaling.md, beside a few."""
    lines: list[Line] = []
    sizes: list[float] = []
    for places in IN_FLIGHT:
        mean = _MEDIAN * 2.72 ** (_SIGMA * _SIGMA / 2)
        kafka = asyncio.run(topic_with_prompts(address, int(places / mean * (_WATCH_SECONDS + 40)) + 2 * places))
        arguments = ("--places", places, "--median", _MEDIAN, "--sigma", _SIGMA)
        with engine(folder, *arguments) as url, running(kafka, [url], 1, folder, window=places) as (port,):
            watch([url], [places], 1.0)  # warm
            before = so_far([port])
            in_use, _ = watch([url], [places], _WATCH_SECONDS, warm_up=0.0)
            seconds, cpu, done = (now - then for then, now in zip(before, so_far([port]), strict=True))
            sizes.append(read(port, "process_resident_memory_bytes"))
        name = f"{places:,} in flight in one process"
        lines += [
            Line(name=f"{name}, in use", value=in_use, unit="of the places"),
            Line(name=f"{name}, records", value=done / seconds, unit="/s"),
            Line(name=f"{name}, CPU a record", value=1000 * cpu / done, unit="ms"),
            Line(name=f"{name}, memory", value=sizes[-1] / 2**20, unit="MiB"),
        ]
    each = (sizes[1] - sizes[0]) / (IN_FLIGHT[1] - IN_FLIGHT[0])
    return [*lines, Line(name="a record in flight, memory", value=each / 1000, unit="kB")]
