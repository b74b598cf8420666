"""Every speed and size budget, measured beside its reference: `make bench`, and `make bench-long` for what takes long.

    python -m tests.bench [names ...] [--long] [--out out/bench.json] [--before earlier.json]

Takes about ten minutes on two idle cores. Exit status 1 when a budget falls short.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from pathlib import Path

from tests.bench.table import Line, machine, pace, read, show, write

BENCHES = ("sizes", "ingest", "sink", "generator")
LONG = ("ingest", "sink", "processes", "endurance")


def main() -> None:
    """Run benches one after the other, print what each says at once, and all of it at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}; with --long of {', '.join(LONG)}; else all")
    parser.add_argument("--long", action="store_true", help="memory over 1 M records, crashes, the first run")
    parser.add_argument("--out", type=Path, help="where the JSON goes: out/bench.json or out/bench-long.json")
    parser.add_argument("--before", type=Path, help="JSON of an earlier run to compare with; else the one at --out")
    args = parser.parse_args()
    known = LONG if args.long else BENCHES
    if unknown := set(args.names) - set(known):
        parser.error(f"no bench called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    out = args.out or Path("out/bench-long.json" if args.long else "out/bench.json")
    earlier = args.before or out
    before = read(earlier) if earlier.exists() else []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then, too
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    lines: list[Line] = []
    paces = [pace()]
    for name in args.names or known:
        began = time.monotonic()
        module = importlib.import_module(f"tests.bench.{name}")
        measured = module.measure_long() if args.long else module.measure()
        paces.append(pace())
        took = f"{time.monotonic() - began:.0f} s, pace {paces[-2]}, then {paces[-1]}"
        show(measured, f"{name} ({took})", before)
        lines += measured
    write(lines, about | {"pace": "; ".join(map(str, paces))}, out)
    short = [line for line in lines if line.passed is False]
    if len(args.names or known) > 1:
        show([line for line in lines if line.budget], "the budgets", before)
    print(f"{len(short)} of {sum(1 for line in lines if line.budget)} budgets fall short; {out} has it as JSON")
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
