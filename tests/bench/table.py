"""What benches say: one line per figure, held against the reference of the same run and against its budget.

Every bench is a module of this package with `measure() -> list[Line]`; those that take long have `measure_long()` too.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

LIBRARIES = ("aiohttp", "aiokafka", "msgspec", "numpy", "pyarrow", "tokenizers", "zstandard")
T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `reference` is in the same unit and was measured in the same run; a bound holds for the value itself
    or, when `bounds` says so, for the value over the reference."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    reference_name: str = ""
    at_least: float | None = None
    at_most: float | None = None
    bounds: Literal["value", "ratio"] = "value"

    @property
    def ratio(self) -> float | None:
        """The value over the reference; None without one."""
        return self.value / self.reference if self.reference else None

    @property
    def budget(self) -> str:
        """What is allowed, in words; empty when the line only informs."""
        limits = (("≥", self.at_least), ("≤", self.at_most))
        words = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
        return " ".join(words) + (" of the reference" if words and self.bounds == "ratio" else "")

    @property
    def passed(self) -> bool | None:
        """None when there is no budget to hold."""
        bounded = self.ratio if self.bounds == "ratio" else self.value
        if not self.budget:
            return None
        if bounded is None:
            raise ValueError(f"{self.name}: a budget of the ratio without a reference")
        return (self.at_least is None or bounded >= self.at_least) and (self.at_most is None or bounded <= self.at_most)


def paired(ours: Callable[[], T], reference: Callable[[], T], rounds: int) -> tuple[list[T], list[T]]:
    """Both measured `rounds` times in turns, after one unmeasured turn each: what else the machine does hits both."""
    ours(), reference()
    pairs = [(reference(), ours())[::-1] if turn % 2 else (ours(), reference()) for turn in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def median_line(ours: Sequence[float], references: Sequence[float], **fields: Any) -> Line:
    """A line of paired measurements whose ratio is the median of the pairs' ratios."""
    value = statistics.median(ours)
    ratio = statistics.median(a / b for a, b in zip(ours, references, strict=True))
    return Line(value=value, reference=value / ratio, **fields)


def cpu_seconds(pid: int) -> float:
    """CPU time a process has used so far, all its threads and both modes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """The largest resident size a process has had."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """The resident size of a process now."""
    return _status(pid, "VmRSS")


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"process {pid} has no {field}")


class Pace(NamedTuple):
    """How fast the machine is at a moment: CPU milliseconds that a piece of Python takes, and CPU nanoseconds of a read
    anywhere in 16 MB. On rented cores the first changes by half, for seconds or hours, with what others do on the same
    core; the second severalfold with what they leave of the cache. Two runs are comparable when both are near."""

    python: float
    read: float

    def __str__(self) -> str:
        return f"{self.python:.1f} ms and {self.read:.1f} ns"


def pace() -> Pace:
    """What it is now, medians of nine."""
    numbers = np.arange(2**21)
    places = np.random.default_rng(1).integers(0, len(numbers), 2**18)
    python, read = (statistics.median(_cpu(work) for _ in range(9)) for work in (_count, lambda: numbers.take(places)))
    return Pace(1e3 * python, 1e9 * read / len(places))


def _cpu(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _count() -> None:
    for _ in range(200_000):
        pass


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**20:.1f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "libraries": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def show(lines: Sequence[Line], title: str, before: Sequence[Line] = ()) -> None:
    """Print a table. `before` are the lines of an earlier run: what became of each ratio since is printed too."""
    earlier = {line.name: line for line in before}
    table = Table(title=title, title_justify="left")
    for heading in ("", "value", "unit", "reference", "ratio", "budget", "", *["since"] * bool(before)):
        table.add_column(heading, justify="right" if heading in {"value", "ratio", "since"} else "left")
    for line in lines:
        reference = "" if line.reference is None else f"{_number(line.reference)} {line.reference_name}"
        verdict = {True: "[green]pass[/]", False: "[red]falls short[/]", None: ""}[line.passed]
        cells = [line.name, _number(line.value), line.unit, reference, _number(line.ratio), line.budget, verdict]
        if before:
            cells.append(_since(line, earlier.get(line.name)))
        table.add_row(*cells)
    # Not cut to the width of a terminal: the tables go into files, too.
    Console(width=170, highlight=False).print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _since(line: Line, before: Line | None) -> str:
    """By how much a ratio (or a value without a reference) changed."""
    if before is None:
        return "new"
    now, then = (line.ratio, before.ratio) if line.ratio and before.ratio else (line.value, before.value)
    return f"{now / then - 1:+.0%}" if then else ""


def write(lines: Sequence[Line], about: dict[str, str], path: Path) -> None:
    """The same as JSON: {"machine": ..., "lines": [...]}, each line with its ratio and verdict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [msgspec.to_builtins(line) | {"ratio": line.ratio, "passed": line.passed} for line in lines]
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": about, "lines": rows})))


def read(path: Path) -> list[Line]:
    """The lines of an earlier run."""
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["lines"], list[Line])
