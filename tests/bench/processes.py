"""More than one generator process, and one with as much in flight as it is given: `make bench-long BENCH=processes`.

What docs/scaling.md counts pods with: a record costs as much in each of several processes as in one alone, and a record
that is in flight costs memory.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.bench.generator import engine, generator_rate, kafka_node, read, running, so_far, topic_with_prompts, watch
from tests.bench.table import Line
from tests.support.processes import wait_for

PROCESSES = (1, 2, 4)
PARTITIONS = 12  # as many for each of them
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
    rounds = [[generator_rate(address, folder, count, PARTITIONS) for count in PROCESSES] for _ in range(ROUNDS)]
    lines: list[Line] = []
    for count, measured in zip(PROCESSES, zip(*rounds, strict=True), strict=True):
        cpu, rate = sorted(measured, key=lambda one: one[1])[ROUNDS // 2]  # both of the same round: paces differ
        name = f"{count} generator processes"
        alone = lines[0].value if lines else None
        lines.append(
            Line(name=f"{name}, CPU a record", value=1000 * cpu, unit="ms", reference=alone, reference_name="one")
        )
        lines.append(Line(name=f"{name}, records together", value=rate, unit="/s"))
    return lines


def wide(address: str, folder: Path) -> list[Line]:
    """One process that keeps as many places busy as one pod is given in docs/scaling.md, beside a few."""
    few, many = (_holding(address, folder, places) for places in IN_FLIGHT)
    lines = [
        Line(name=f"{places:,} in flight in one process, {what}", value=value, unit=unit)
        for places, held in zip(IN_FLIGHT, (few, many), strict=True)
        for what, value, unit in (
            ("in use", held.in_use, "of the places"),
            ("records", held.rate, "/s"),
            ("CPU a record", 1000 * held.cpu, "ms"),
            ("memory", held.memory / 2**20, "MiB"),
        )
    ]
    each = (many.memory - few.memory) / (IN_FLIGHT[1] - IN_FLIGHT[0])
    return [*lines, Line(name="a record in flight, memory", value=each / 1000, unit="kB")]


class Held(NamedTuple):
    """Of a process over some time: share of places in use, records a second, CPU seconds a record, resident bytes."""

    in_use: float
    rate: float
    cpu: float
    memory: float


def _holding(address: str, folder: Path, places: int) -> Held:
    mean = _MEDIAN * math.exp(_SIGMA * _SIGMA / 2)
    kafka = asyncio.run(topic_with_prompts(address, int(places / mean * (_WATCH_SECONDS + 40)) + 6 * places))
    arguments = ("--places", places, "--median", _MEDIAN, "--sigma", _SIGMA)
    with engine(folder, *arguments) as url, running(kafka, [url], 1, folder, window=places) as (port,):
        # Short outputs end first: only when many have ended there are as many long ones under way as there will be.
        wait_for(lambda: so_far([port])[2] > 6 * places, 180)
        before = so_far([port])
        in_use, _ = watch([url], [places], _WATCH_SECONDS, warm_up=0.0)
        seconds, cpu, done = (now - then for then, now in zip(before, so_far([port]), strict=True))
        return Held(in_use, done / seconds, cpu / done, read(port, "process_resident_memory_bytes"))
