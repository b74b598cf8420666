"""`make chaos SEED=n`: hurt the pipeline on purpose for a while, let it come to its end, and judge what is left.

    python -m tests.chaos.run --seed 7 --minutes 15 [--every 4] [--keep FOLDER]

The same seed is the same schedule of faults. Exit status 0: nothing lost, nothing doubled, nothing paid for without a
reason. Otherwise the evidence stays in the folder that is named.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos import evidence
from tests.chaos.checker import judge
from tests.chaos.schedule import FAILPOINTS, Fault, schedule
from tests.chaos.world import DATASET, World

_ARMED = 5
"""Failpoints of a service: at least one strikes. Others die of something else first, or with the run."""


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="of the schedule (default: one is drawn)")
    parser.add_argument("--minutes", type=float, default=15.0, help="of faults (default %(default)s)")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults (default %(default)s)")
    parser.add_argument(
        "--settle", type=float, default=180.0, help="seconds without progress at the end (default %(default)s)"
    )
    parser.add_argument("--keep", type=Path, default=None, help="folder that is kept")
    arguments = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix=f"tokenhaul-chaos-{seed}-"))
    faults = schedule(seed, arguments.minutes * 60, arguments.every)
    print(f"seed {seed}: {len(faults)} faults in {arguments.minutes:g} minutes, in {folder}", flush=True)
    problems = _run(World(folder, seed), faults, arguments.settle)
    if problems:
        print(f"\nFAILED with seed {seed}; what is left is in {folder}")
        print(*problems[:50], sep="\n")
        return 1
    if arguments.keep is None:
        shutil.rmtree(folder)
    print(f"seed {seed}: nothing lost, nothing doubled, nothing paid for without a reason")
    return 0


def _run(world: World, faults: list[Fault], settle: float) -> list[str]:
    began = time.monotonic()
    with world:
        world.wait_until_it_runs()
        print(f"it runs after {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        for fault in faults:
            world.wait(began + fault.at)
            print(fault, flush=True)
            world.hurt(fault)
        try:
            world.finish(settle)
        except AssertionError as error:
            return [str(error), *world.unexpected]
        left = evidence.read(
            world.cluster.bootstrap, world.prefix, world.root / DATASET, world.engine_logs, world.feeding.files,
            world.journal,
        )  # fmt: skip
    verdict = judge(left)
    kinds = Counter(f"{fault.kind} {fault.target.partition('-')[0]}" for fault in faults)
    kinds.update({f"died: {where}": count for where, count in world.struck.items()})
    for name, count in [*sorted(kinds.items()), *verdict.counts.items()]:
        print(f"{count:8} {name}")
    return [*verdict.problems, *world.unexpected, *world.feeding.failed, *never_struck(faults, world.struck)]


def never_struck(faults: list[Fault], struck: Counter[str]) -> list[str]:
    """Services that were to die at a place again and again, and never did: their places do not work."""
    armed = Counter(fault.target.partition("-")[0] for fault in faults if fault.kind == "failpoint")
    return [
        f"{service} was to die at a place {count} times and never did"
        for service, count in armed.items()
        if count >= _ARMED and not any(struck[f"{service} {place}"] for place in FAILPOINTS[service])
    ]


if __name__ == "__main__":
    sys.exit(main())
