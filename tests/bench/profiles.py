"""Where each service spends its CPU: py-spy over a run of each, alone on the machine.

    python -m tests.bench.profiles [--records 20000] [--into out/profiles]

Keeps collapsed stacks (speedscope and flamegraph.pl read them), and prints which functions are the dearest: by
themselves, and with what they call. Starting up is left out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.generator import engine, kafka_node
from tests.bench.growth import MIDDLE_PARTITIONS, PROMPT_TOKENS, SERVICES
from tests.bench.stages import Stages, texts

_SHOWN = 16
_STARTING = ("<module>", "_find_and_load", "exec_module")
_WAITING = ("_worker (concurrent", "EpollSelector.select")  # seen as work on a machine that is busy otherwise


def profile(records: int, into: Path) -> None:
    """Run each service once under py-spy; its stacks go to `into`/<service>.txt."""
    os.environ["PROFILE"] = str(into)
    with tempfile.TemporaryDirectory() as name, kafka_node(Path(name)) as address, engine(Path(name)) as url:
        stages = Stages(address, Path(name) / "bench", MIDDLE_PARTITIONS, texts(records, PROMPT_TOKENS))
        for service in SERVICES:
            stages.run(service, TOKENHAUL_GENERATOR_ENGINES=url, TOKENHAUL_GENERATOR_WINDOW="512")


def dearest(stacks: Iterable[str]) -> tuple[Counter[str], Counter[str], int]:
    """(samples of functions by themselves, with what they call, samples in all) of lines "frame;frame;frame count"."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    total = 0
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] or frame for frame in stack.split(";")]
        starting = any(frame.startswith(_STARTING) and "services/cli.py" not in frame for frame in frames)
        if starting or frames[-1].startswith(_WAITING):
            continue
        total += int(count)
        own[frames[-1]] += int(count)
        whole.update(dict.fromkeys(frames, int(count)))
    return own, whole, total


def show(service: str, path: Path) -> None:
    """Print both lists."""
    own, whole, total = dearest(path.read_text().splitlines())
    table = Table(title=f"{service}: {total} samples", title_justify="left")
    for heading in ("by itself", "", "with what it calls", ""):
        table.add_column(heading)
    ours = [item for item in whole.most_common() if "services/" in item[0] and item[1] < total * 0.9]
    for (name, count), (caller, with_calls) in zip(own.most_common(_SHOWN), ours, strict=False):
        table.add_row(f"{count / total:.1%}", name, f"{with_calls / total:.1%}", caller)
    Console(width=170, highlight=False).print(table)


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profiles")
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--into", type=Path, default=Path("out/profiles"))
    args = parser.parse_args()
    profile(args.records, args.into)
    for service in SERVICES:
        show(service, args.into / f"{service}.txt")


if __name__ == "__main__":
    main()
