"""What a record costs as there are more of them, more partitions, and longer ones: `make bench-growth`.

    python -m tests.bench.growth [--unit 2000] [--json out/bench-growth.json]

CPU of the whole process less what a run of one record needs (interpreter, imports, connections), over the records.
tests/bench/plots.py draws it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec

from tests.bench.generator import engine, kafka_node
from tests.bench.stages import Stages, Used, texts
from tests.bench.table import machine

SERVICES = ("ingest", "generate", "sink")
PROMPT_TOKENS = 280  # 300 with the template around it
TIMES = (1, 10, 100)
PARTITIONS = (1, 4, 16)
MIDDLE_PARTITIONS = 4
OUTPUT_TOKENS = (200, 2000, 8000)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One service over `records` of `output` generated ids each, start and end included."""

    service: str
    records: int
    partitions: int
    output: int
    used: Used


class Growth(msgspec.Struct, frozen=True):
    """All runs of a machine."""

    machine: dict[str, str]
    unit: int
    runs: list[Run]

    def start(self, service: str) -> float:
        """CPU seconds of a run of one record."""
        return min(run.used.cpu for run in self.runs if run.service == service and run.records == 1)

    def cost(self, run: Run) -> float:
        """CPU seconds a record."""
        return (run.used.cpu - self.start(run.service)) / run.records

    def of(self, service: str) -> list[Run]:
        """The runs of a service over more than one record."""
        return [run for run in self.runs if run.service == service and run.records > 1]


def grow(unit: int) -> Growth:
    """Measure everything, and print it as it comes."""
    growth = Growth(machine(), unit, [])
    cases = [(1, MIDDLE_PARTITIONS, OUTPUT_TOKENS[0])]
    cases += [(unit * times, MIDDLE_PARTITIONS, OUTPUT_TOKENS[0]) for times in TIMES]
    cases += [(unit * 10, partitions, OUTPUT_TOKENS[0]) for partitions in PARTITIONS if partitions != MIDDLE_PARTITIONS]
    cases += [(unit, MIDDLE_PARTITIONS, output) for output in OUTPUT_TOKENS[1:]]
    with tempfile.TemporaryDirectory() as name, kafka_node(Path(name)) as address:
        for number, (records, partitions, output) in enumerate(cases):
            folder = Path(name) / f"case-{number}"
            stages = Stages(address, folder, partitions, texts(records, PROMPT_TOKENS))
            with engine(Path(name), "--output", output) as url:
                for service in SERVICES:
                    used = stages.run(service, TOKENHAUL_GENERATOR_ENGINES=url, TOKENHAUL_GENERATOR_WINDOW="512")
                    run = Run(service=service, records=records, partitions=partitions, output=output, used=used)
                    growth.runs.append(run)
                    cost = f"{growth.cost(run) * 1000:.3f} ms CPU a record, " if records > 1 else ""
                    print(
                        f"{service}: {records} records, {partitions} partitions, {output} output ids: {cost}"
                        f"{used.cpu:.1f} s CPU in {used.seconds:.1f} s, at most {used.peak / 2**20:.0f} MiB",
                        flush=True,
                    )
    return growth


def main() -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth")
    parser.add_argument("--unit", type=int, default=2000, help="records of the smallest run")
    parser.add_argument("--json", type=Path, default=Path("out/bench-growth.json"))
    args = parser.parse_args()
    growth = grow(args.unit)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(growth)))


if __name__ == "__main__":
    main()
