"""The whole pipeline on a cluster of three nodes, and the hands that hurt it: every hurt is noted in the journal."""

from __future__ import annotations

import heapq
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Self

from services.local.kafka import free_ports
from services.local.processes import Child, end
from services.local.run import LOCAL_TOKENIZER
from tests.chaos.feeding import Feeding
from tests.chaos.schedule import ENGINES, SERVICES, Fault
from tests.support.cluster import Cluster
from tests.support.processes import TOKENHAUL, wait_for

DATASET = "chaos"
PARTITIONS = 6
SLOTS = 16
_ENGINE_SECONDS = 0.3
_MOST_SECONDS = 1800.0  # to come to an end
_START_SECONDS = 90.0
# A second SIGTERM ends a service at once, as does the first before it has begun; 137: an engine that dies by script.
_BY_ITSELF = (None, 0, -signal.SIGKILL, -signal.SIGTERM, 137)


class Process:
    """A service or an engine that is started again whenever it ends, unless it ended as it never must."""

    def __init__(self, name: str, command: list[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._command, self._environ = command, dict(environ)
        self.held_until = 0.0
        """Not to be started again before then (time.monotonic)."""
        self.failpoint = ""
        """Where it is to die by itself; empty once something else has killed it."""
        self.child = Child(name, command, log, environ)

    @property
    def service(self) -> str:
        """Its name without a number."""
        return self.name.partition("-")[0]

    def signal(self, number: signal.Signals) -> None:
        """Send it, if it still runs."""
        if self.child.status is None:
            if number == signal.SIGKILL:
                self.failpoint = ""
            os.kill(self.child.pid, number)

    def start(self, *, failpoint: str = "", more: tuple[str, ...] = ()) -> None:
        """Start it anew; the one before must be gone."""
        environ = self._environ | ({"TOKENHAUL_FAILPOINTS": failpoint} if failpoint else {})
        self.failpoint = failpoint
        self.child = Child(self.name, [*self._command, *more], self.log, environ)


class World:
    """Everything that runs, in `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "kafka")
        self.processes: dict[str, Process] = {}
        self.journal = folder / "journal.jsonl"
        self.unexpected: list[str] = []
        self.struck: Counter[str] = Counter()  # "service place" of failpoints at which one died
        (self._ingest_port,) = free_ports(1)
        self.feeding = Feeding(folder, seed, f"http://127.0.0.1:{self._ingest_port}")
        self._numbers = count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._held: dict[int, float] = {}
        self._engine_ports = dict(zip(ENGINES, free_ports(len(ENGINES)), strict=True))

    @property
    def prefix(self) -> str:
        """Of the topics."""
        return "chaos"

    @property
    def root(self) -> Path:
        """The sink's."""
        return self.folder / "out"

    @property
    def engine_logs(self) -> list[Path]:
        """What the engines have noted."""
        return [self.folder / f"{name}.jsonl" for name in ENGINES]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal.touch()
        (self.folder / "sources.yaml").write_text(
            f"sources: [{{name: files, files: [{self.feeding.folder}], max_new_tokens: 64}},"
            "{name: pushed, http: true, max_new_tokens: 64}]\n"
        )
        self.cluster.__enter__()
        made = subprocess.run(
            [*TOKENHAUL, "topics", "create", "--dataset", DATASET, "--model", "fake", "--partitions", str(PARTITIONS)],
            env=os.environ | self._kafka, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert made.returncode == 0, made.stdout + made.stderr
        for name in ENGINES:
            self._add(name, self._engine_command(name), {"OMP_NUM_THREADS": "1"})
        for name in SERVICES:
            self._add(name, [*TOKENHAUL, name.partition("-")[0]], self._settings(name))
        self.feeding.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.feeding.stop()
        for process in self.processes.values():
            process.signal(signal.SIGCONT)
        end([process.child for process in self.processes.values()], 20)
        self.cluster.__exit__()

    def wait(self, until: float) -> None:
        """Until then (time.monotonic), pauses end when they are over, and what has ended is started again.

        All of it in this one thread: a child dies with the thread that started it."""
        while True:
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            for process in self.processes.values():
                if process.child.status is not None and now >= process.held_until:
                    self._judge_end(process)
                    self._note(Fault(0.0, "ended", process.name))
                    if process.failpoint and process.child.status == -signal.SIGKILL:
                        self.struck[f"{process.service} {process.failpoint.partition('=')[0]}"] += 1
                    process.start()
            for node, held_until in self._held.items():
                if now >= held_until and not self.cluster.runs(node):
                    self.cluster.start(node)
            if now >= until:
                return
            time.sleep(min(0.1, max(0.0, until - now)))

    def wait_until_it_runs(self) -> None:
        """Until the first rows have landed."""
        wait_for(lambda: any(self.root.glob(f"{DATASET}/partition=*/*.parquet")), _START_SECONDS)

    def hurt(self, fault: Fault) -> None:
        """Do what `fault` says. What lasts ends while `wait` is called."""
        if fault.target.startswith("kafka-"):
            self._note(fault)
            self._hurt_broker(fault, int(fault.target.removeprefix("kafka-")))
            return
        process = self.processes[fault.target]
        if fault.kind == "engine":
            self._script(fault)
            return
        self._note(fault)
        match fault.kind:
            case "kill":
                process.held_until = time.monotonic() + fault.seconds
                process.signal(signal.SIGKILL)
            case "restart":
                process.signal(signal.SIGTERM)
            case "freeze":
                process.signal(signal.SIGSTOP)
                self._after(fault.seconds, lambda: process.signal(signal.SIGCONT))
            case "failpoint":
                process.signal(signal.SIGKILL)
                process.child.wait_or_kill(time.monotonic() + 10)
                process.start(failpoint=fault.detail)

    def finish(self, seconds: float) -> None:
        """Stop feeding and hurting, let every service come to its end (`--until-idle`). Raises AssertionError."""
        self.feeding.stop()
        self._wait_while_it_moves(lambda: self.feeding.ended, seconds, "ingest did not take the last push")
        self.wait(max([time.monotonic(), *(at for at, _, _ in self._later), *self._held.values()]) + 1.0)
        self.cluster.heal()
        services = [self.processes[name] for name in SERVICES]
        for process in services:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        for process in services:
            process.child.wait_or_kill(deadline)
            self._judge_end(process)
            if process.child.status == -signal.SIGKILL and not process.failpoint and time.monotonic() >= deadline:
                self.unexpected.append(f"{process.name} did not end within a minute of SIGTERM")
            self._note(Fault(0.0, "restart", process.name))
            process.start(more=("--until-idle",))
        for process in services:
            process.held_until = math.inf  # it is to end by itself
        self._wait_while_it_moves(lambda: self._ended(services), seconds, "not idle")

    def _wait_while_it_moves(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """For `seconds` after the last sign of progress, at most _MOST_SECONDS: a slow machine takes its time, and one
        that stands still or goes in circles is found. Raises AssertionError."""
        began = moved = time.monotonic()
        made = 0
        while not done():
            now = time.monotonic()
            if (more := self._made()) != made:
                made, moved = more, now
            waiting = [name for name in SERVICES if not self.processes[name].child.done]
            where = f"{waiting}; see {self.folder}"
            assert now - moved < seconds, f"{what}, nothing moved for {seconds} s: {where}"
            assert now - began < _MOST_SECONDS, f"{what} within {_MOST_SECONDS} s: {where}"
            self.wait(now + 0.2)

    def _made(self) -> int:
        """Grows with every generation and every shard."""
        logs = sum(log.stat().st_size for log in self.engine_logs if log.exists())
        return logs + sum(1 for _ in self.root.rglob("*.parquet"))

    @staticmethod
    def _ended(services: list[Process]) -> bool:
        """Whether they all have, as they should. Raises AssertionError."""
        for process in services:
            status = process.child.status
            assert status in (None, 0), f"{process.name} ended with {status}:\n{process.child.tail()}"
        return all(process.child.done for process in services)

    def _hurt_broker(self, fault: Fault, node: int) -> None:
        self._held[node] = time.monotonic() + fault.seconds
        match fault.kind:
            case "kill":
                self.cluster.kill(node)
            case "restart":
                self.cluster.stop(node)
            case "freeze":
                self.cluster.freeze(node)
                self._after(fault.seconds, lambda: self.cluster.thaw(node))
            case "isr":  # no majority of in-sync replicas, nor of controllers
                other = node % len(self.cluster.nodes) + 1
                self._held[other] = self._held[node]
                self.cluster.kill(node)
                self.cluster.kill(other)
            case "elect":
                self.cluster.elect_preferred()

    def _script(self, fault: Fault) -> None:
        url = f"http://127.0.0.1:{self._engine_ports[fault.target]}/fake/script"
        try:
            urllib.request.urlopen(urllib.request.Request(url, fault.detail.encode()), timeout=5).close()
        except OSError:
            return  # it is down just now
        self._note(fault)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), action))

    def _note(self, fault: Fault) -> None:
        now = time.time()
        with self.journal.open("a") as journal:
            journal.write(json.dumps([fault.kind, fault.target, now, now + fault.seconds]) + "\n")

    def _judge_end(self, process: Process) -> None:
        status = process.child.status
        if status not in _BY_ITSELF:
            self.unexpected.append(f"{process.name} ended with {status}:\n{process.child.tail()}")

    def _add(self, name: str, command: list[str], environ: Mapping[str, str]) -> None:
        self.processes[name] = Process(name, command, self.folder / f"{name}.log", os.environ | environ)

    def _engine_command(self, name: str) -> list[str]:
        return [
            sys.executable, "-m", "tests.support.fake_engine", "--port", str(self._engine_ports[name]),
            "--log", str(self.folder / f"{name}.jsonl"), "--slots", str(SLOTS), "--latency", str(_ENGINE_SECONDS),
            "--latency-sigma", "0.7", "--tokenizer", str(LOCAL_TOKENIZER),
        ]  # fmt: skip

    @property
    def _kafka(self) -> dict[str, str]:
        return {"TOKENHAUL_KAFKA_BOOTSTRAP": ",".join(self.cluster.bootstrap), "TOKENHAUL_KAFKA_PREFIX": self.prefix}

    def _settings(self, name: str) -> dict[str, str]:
        return self._kafka | {
            "TOKENHAUL_RUN_ID": "chaos",
            "TOKENHAUL_LOG_FORMAT": "json",
            "TOKENHAUL_METRICS_PORT": str(free_ports(1)[0]),
            "TOKENHAUL_DRAIN_SECONDS": "3",
            "TOKENHAUL_KAFKA_SESSION_TIMEOUT_SECONDS": "6",
            # One member of each group is static, the other joins and leaves.
            "TOKENHAUL_KAFKA_INSTANCE": name if name.endswith("-0") else "",
            "TOKENHAUL_INGEST_SOURCES_FILE": str(self.folder / "sources.yaml"),
            "TOKENHAUL_INGEST_TOKENIZER": str(LOCAL_TOKENIZER),
            "TOKENHAUL_INGEST_HTTP_PORT": str(self._ingest_port) if name == "ingest" else "0",
            "TOKENHAUL_INGEST_SCAN_SECONDS": "0.5",
            "TOKENHAUL_INGEST_BATCH_RECORDS": "16",
            "TOKENHAUL_GENERATOR_ENGINES": ",".join(f"http://127.0.0.1:{port}" for port in self._engine_ports.values()),
            "TOKENHAUL_GENERATOR_WINDOW": str(SLOTS),
            # Whoever is in flight at many deaths here is unlucky, not a killer.
            "TOKENHAUL_GENERATOR_DEATHS": "50",
            "TOKENHAUL_GENERATOR_ATTEMPTS": "50",
            "TOKENHAUL_SINK_ROOT": str(self.root),
            "TOKENHAUL_SINK_MAX_ROWS": "200",
            "TOKENHAUL_SINK_MAX_AGE_SECONDS": "2",
        }  # fmt: skip
