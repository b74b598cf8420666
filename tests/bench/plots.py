"""Draws what tests.bench.growth measured: docs/growth.png.

python -m tests.bench.plots [--growth out/bench-growth.json] [--into docs]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from tests.bench.growth import MIDDLE_PARTITIONS, OUTPUT_TOKENS, SERVICES, Growth

_MARKERS = dict(zip(SERVICES, ("o", "s", "^"), strict=True))


def growth(measured: Growth, path: Path) -> None:
    """CPU a record against their number, the partitions, and the length of outputs."""
    figure, (records, partitions, outputs) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    short, unit = OUTPUT_TOKENS[0], measured.unit
    for service in SERVICES:
        runs = measured.of(service)
        _line(records, service, {r.records: measured.cost(r) for r in runs if _middle(r.partitions, r.output)})
        at_10 = [run for run in runs if run.records == unit * 10 and run.output == short]
        _line(partitions, service, {run.partitions: measured.cost(run) for run in at_10})
        at_1 = [run for run in runs if run.records == unit and run.partitions == MIDDLE_PARTITIONS]
        _line(outputs, service, {run.output: measured.cost(run) for run in at_1})
    for axes, label in ((records, "records"), (partitions, "partitions"), (outputs, "ids an answer")):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(sorted({x for line in axes.get_lines() for x in map(int, line.get_xdata())}))
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    records.set_ylabel("ms CPU a record")
    records.legend()
    figure.suptitle(
        f"Cost of a record, {measured.machine['cores']} cores, {measured.machine['processor']}", fontsize=10
    )
    figure.savefig(path, dpi=90)


def _middle(partitions: int, output: int) -> bool:
    return partitions == MIDDLE_PARTITIONS and output == OUTPUT_TOKENS[0]


def _line(axes: Axes, service: str, points: dict[int, float]) -> None:
    x = sorted(points)
    axes.plot(x, [points[each] * 1000 for each in x], marker=_MARKERS[service], label=service)


def main() -> None:
    """Draw what there is."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.plots")
    parser.add_argument("--growth", type=Path, default=Path("out/bench-growth.json"))
    parser.add_argument("--into", type=Path, default=Path("docs"))
    args = parser.parse_args()
    mpl.use("Agg")
    growth(msgspec.json.decode(args.growth.read_bytes(), type=Growth), args.into / "growth.png")


if __name__ == "__main__":
    main()
