"""The whole pipeline on a cluster of three nodes, and the hands that hurt it: every hurt is noted in the journal."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from services.local.kafka import free_ports
from services.local.processes import Child, end
from services.local.run import LOCAL_TOKENIZER
from tests.chaos.schedule import ENGINES, SERVICES, Fault
from tests.support.cluster import Cluster
from tests.support.processes import TOKENHAUL, wait_for

DATASET = "chaos"
PARTITIONS = 6
SLOTS = 16
_ENGINE_SECONDS = 0.3
_START_SECONDS = 90.0
_BY_ITSELF = (None, 0, -signal.SIGKILL, 137)  # 137: an engine that dies as its script says


class Process:
    """A service or an engine that is started again whenever it ends, unless it ended as it never must."""

    def __init__(self, name: str, command: list[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._command, self._environ = command, dict(environ)
        self.held_until = 0.0
        """Not to be started again before then (time.monotonic)."""
        self.frozen = False
        self.child = Child(name, command, log, environ)

    def signal(self, number: signal.Signals) -> None:
        """Send it, if it still runs."""
        if self.child.status is None:
            os.kill(self.child.pid, number)

    def start(self, *, failpoint: str = "", more: tuple[str, ...] = ()) -> None:
        """Start it anew; the one before must be gone."""
        environ = self._environ | ({"TOKENHAUL_FAILPOINTS": failpoint} if failpoint else {})
        self.child = Child(self.name, [*self._command, *more], self.log, environ)


class World:
    """Everything that runs, in `folder`. `short` makes less of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "kafka")
        self.processes: dict[str, Process] = {}
        self.journal = folder / "journal.jsonl"
        self.unexpected: list[str] = []
        self.faults = 0
        self._sources = folder / "sources"
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
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

    @property
    def source_files(self) -> list[Path]:
        """What ingest reads."""
        return sorted(self._sources.glob("*.jsonl"))

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sources.mkdir()
        self.journal.touch()
        (self.folder / "sources.yaml").write_text(
            f"sources: [{{name: files, files: [{self._sources}], max_new_tokens: 64}}]\n"
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
        for target in (self._feed, self._supervise):
            self._threads.append(threading.Thread(target=target, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        for process in self.processes.values():
            process.signal(signal.SIGCONT)
        end([process.child for process in self.processes.values()], 20)
        self.cluster.__exit__()

    def hurt(self, fault: Fault) -> None:
        """Do what `fault` says. What lasts ends by a timer."""
        self.faults += 1
        if fault.target.startswith("kafka-"):
            self._hurt_broker(fault, int(fault.target.removeprefix("kafka-")))
            return
        process = self.processes[fault.target]
        match fault.kind:
            case "kill":
                self._note(fault)
                process.held_until = time.monotonic() + fault.seconds
                process.signal(signal.SIGKILL)
            case "restart":
                self._note(fault)
                process.signal(signal.SIGTERM)
            case "freeze" if not process.frozen:
                self._note(fault)
                process.frozen = True
                process.signal(signal.SIGSTOP)
                self._later(fault.seconds, lambda: self._thaw(process))
            case "failpoint":
                self._note(fault)
                with self._lock:
                    process.signal(signal.SIGKILL)
                    process.child.wait_or_kill(time.monotonic() + 10)
                    process.start(failpoint=fault.detail)
            case "engine":
                self._script(fault)

    def finish(self, seconds: float) -> None:
        """Stop feeding and hurting, let every service come to its end (`--until-idle`). Raises AssertionError."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        for node in self.cluster.nodes:
            self.cluster.heal(node)
        for name in ENGINES:
            if self.processes[name].child.status is not None:
                self.processes[name].start()
        services = [self.processes[name] for name in SERVICES]
        for process in services:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        for process in services:
            process.child.wait_or_kill(time.monotonic() + 60)
            self._judge_end(process)
            self._note(Fault(0.0, "restart", process.name))
            process.start(more=("--until-idle",))
        deadline = time.monotonic() + seconds
        while not all(process.child.done for process in services):
            for process in services:
                status = process.child.status
                assert status in (None, 0), f"{process.name} ended with {status}:\n{process.child.tail()}"
            waiting = [process.name for process in services if not process.child.done]
            assert time.monotonic() < deadline, f"not idle within {seconds} s: {waiting}; see {self.folder}"
            time.sleep(0.2)

    def _hurt_broker(self, fault: Fault, node: int) -> None:
        self._note(fault)
        match fault.kind:
            case "kill":
                self.cluster.kill(node)
                self._later(fault.seconds, lambda: self.cluster.start(node))
            case "restart":
                self._later(0.0, lambda: self._bounce(node))
            case "freeze":
                self.cluster.freeze(node)
                self._later(fault.seconds, lambda: self.cluster.thaw(node))
            case "isr":  # no majority of in-sync replicas, nor of controllers
                other = node % len(self.cluster.nodes) + 1
                self.cluster.kill(node)
                self.cluster.kill(other)
                self._later(fault.seconds, lambda: self._start(node, other))
            case "elect":
                self._later(0.0, self.cluster.elect_preferred)

    def _bounce(self, node: int) -> None:
        self.cluster.stop(node)
        self.cluster.start(node)

    def _start(self, *nodes: int) -> None:
        for node in nodes:
            self.cluster.start(node)

    def _thaw(self, process: Process) -> None:
        process.frozen = False
        process.signal(signal.SIGCONT)

    def _script(self, fault: Fault) -> None:
        url = f"http://127.0.0.1:{self._engine_ports[fault.target]}/fake/script"
        try:
            urllib.request.urlopen(urllib.request.Request(url, fault.detail.encode()), timeout=5).close()
        except OSError:
            return  # it is down just now
        self._note(fault)

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.start()
        self._threads.append(timer)

    def _note(self, fault: Fault) -> None:
        now = time.time()
        with self.journal.open("a") as journal:
            journal.write(json.dumps([fault.kind, fault.target, now, now + fault.seconds]) + "\n")

    def _supervise(self) -> None:
        while not self._stop.wait(0.1):
            for process in self.processes.values():
                with self._lock:
                    if process.child.status is None or time.monotonic() < process.held_until:
                        continue
                    self._judge_end(process)
                    self._note(Fault(0.0, "ended", process.name))
                    process.start()

    def _judge_end(self, process: Process) -> None:
        status = process.child.status
        if status not in _BY_ITSELF:
            self.unexpected.append(f"{process.name} ended with {status}:\n{process.child.tail()}")

    def _feed(self) -> None:
        """Lines for as long as it goes, into file after file; now and then a line comes in two halves."""
        number = 0
        while not self._stop.is_set():
            with (self._sources / f"{number:07d}.jsonl").open("ab", buffering=0) as file:
                for _ in range(self._chance.randint(50, 400)):
                    if self._stop.wait(self._chance.expovariate(25.0)):
                        return
                    line = json.dumps({"prompt": f"Say {number} in other words."}).encode() + b"\n"
                    cut = self._chance.randrange(1, len(line)) if self._chance.random() < 0.05 else len(line)
                    file.write(line[:cut])
                    if cut < len(line):
                        self._stop.wait(0.7)
                        file.write(line[cut:])
                    number += 1

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


def wait_until_it_runs(world: World) -> None:
    """Until the first rows have landed."""
    wait_for(lambda: any(world.root.glob(f"{DATASET}/partition=*/*.parquet")), _START_SECONDS)
