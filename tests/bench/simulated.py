"""The simulation beside real processes at small size, and alone at large: the tables of docs/scaling.md.

python -m tests.bench.simulated [--real] [--large]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from services.kernel.groups import group_offsets, partitions_of
from services.kernel.kafka import Kafka
from services.local.kafka import free_ports
from services.local.processes import Child, end
from tests.bench.generator import engine, kafka_node, start_generator, topic_with_prompts
from tests.bench.simulation import Case, Result, simulate
from tests.support.processes import kill
from tests.support.stream import PARTITIONS

SMALL = Case(generators=3, engines=2, places=64, partitions=PARTITIONS, median=0.4, sigma=1.2, seconds=55)
KILLED = msgspec.structs.replace(SMALL, seconds=80, kills=(25.0,), session_seconds=10, restart_seconds=30)
GROWN = msgspec.structs.replace(SMALL, generators=1, seconds=70, scale=((30.0, 3),))
REAL = {"steady": SMALL, "one of three killed, back after 30 s": KILLED, "from one generator to three": GROWN}

# As docs/scaling.md counts: 64 requests a GPU, outputs take 51 s on the mean, one in a hundred five times as long.
_EIGHT = Case(generators=2, engines=8, places=512, partitions=12, median=36, sigma=0.83, seconds=400, warm_up=60)
_MANY = msgspec.structs.replace(_EIGHT, generators=5, engines=32, partitions=32)
LARGE = {
    "64 GPUs, 2 generators": _EIGHT,
    "64 GPUs, one of 2 killed, back after 60 s": msgspec.structs.replace(_EIGHT, kills=(150.0,)),
    "64 GPUs, one of 2 killed, static member back after 10 s": msgspec.structs.replace(
        _EIGHT, kills=(150.0,), restart_seconds=10
    ),
    "64 GPUs, one of 8 killed, back after 60 s": msgspec.structs.replace(_EIGHT, generators=8, kills=(150.0,)),
    "256 GPUs, 5 generators": _MANY,
    "256 GPUs, from 5 generators to 8 and back": msgspec.structs.replace(_MANY, scale=((150.0, 8), (270.0, 5))),
}


def real(case: Case, folder: Path, address: str) -> Result:
    """The same with processes: engines of tests.bench.engine, Kafka, generators that are killed and started."""
    mean = case.median * 2.72 ** (case.sigma**2 / 2)
    kafka = asyncio.run(topic_with_prompts(address, int(case.engines * case.places / mean * (case.seconds + 20))))
    session = {"TOKENHAUL_KAFKA_SESSION_TIMEOUT_SECONDS": str(case.session_seconds)}
    events = [(second, "kill") for second in case.kills]
    events += [(second + case.restart_seconds, "start") for second in case.kills]
    events += [(second, "start") for second, count in case.scale for _ in range(count - case.generators)]
    with ExitStack() as stack:
        places = ["--places", case.places, "--median", case.median, "--sigma", case.sigma]
        urls = [stack.enter_context(engine(folder, *places)) for _ in range(case.engines)]
        children: list[Child] = []
        stack.callback(lambda: end(children, 10))

        def start() -> None:
            children.append(start_generator(kafka, urls, folder, free_ports(1)[0], **session))

        for _ in range(case.generators):
            start()
        while not sum(_get(url, "/asked")["asked"] for url in urls):
            time.sleep(0.1)
        began = time.monotonic()
        running: list[int] = []
        waiting: list[int] = []
        while (now := time.monotonic() - began) < case.seconds:
            if events and now >= min(events)[0]:
                event = min(events)
                events.remove(event)
                kill(children[0].pid) if event[1] == "kill" else start()
            if now >= case.warm_up:
                loads = [_get(url, "/v1/loads")["loads"][0] for url in urls]
                running.append(sum(load["num_running_reqs"] for load in loads))
                waiting.append(sum(load["num_waiting_reqs"] for load in loads))
            time.sleep(0.1)
        told = [_get(url, "/asked") for url in urls]
        marks = asyncio.run(_watermarks(kafka))
    every = case.engines * case.places
    records = {record for each in told for record in each["records"]}
    return Result(
        in_use=sum(running) / len(running) / every,
        waiting=sum(waiting) / max(1, sum(running)),
        done=len(records),
        again=sum(each["asked"] for each in told) - len(records),
        lost_share=sum(each["lost_seconds"] for each in told) / every / case.seconds,
        behind=1 - min(marks) / max(1.0, sum(marks) / len(marks)),
    )


async def _watermarks(kafka: Kafka) -> list[int]:
    async with kafka.started(kafka.admin) as admin:
        partitions = await partitions_of(admin, kafka.topics.prompts)
        committed = await group_offsets(admin, kafka.topics.generator_group, partitions)
    return [committed.get(tp.partition, (0, ""))[0] for tp in partitions]


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}") as answer:
        return msgspec.json.decode(answer.read())


def _row(name: str, result: Result) -> str:
    return (
        f"| {name} | {result.in_use:.3f} | {result.waiting:.3f} | {result.done:,} | {result.again:,} "
        f"| {result.lost_share:.1%} | {result.behind:.0%} |"
    )


HEAD = (
    "| case | places in use | waiting of running | records | asked again | places lost | slowest partition behind |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.simulated")
    parser.add_argument("--real", action="store_true", help="small cases, simulated and with processes (5 min)")
    parser.add_argument("--large", action="store_true", help="fleets, simulated (5 min)")
    args = parser.parse_args()
    if args.real:
        print(HEAD)
        with tempfile.TemporaryDirectory() as name, kafka_node(Path(name)) as address:
            for what, case in REAL.items():
                print(_row(f"{what}: simulated", simulate(case)))
                print(_row(f"{what}: real", real(case, Path(name), address)), flush=True)
    if args.large:
        print(HEAD)
        for what, case in LARGE.items():
            print(_row(what, simulate(case)), flush=True)


if __name__ == "__main__":
    main()
