"""The services one after the other over the same records, each alone on the machine: what each of them used.

Every stage is the process a user starts, `tokenhaul NAME --until-idle`, from its start to its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import msgspec

from services.kernel import topics
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.local.kafka import free_ports
from tests.bench import qwen3
from tests.bench.table import resident_bytes
from tests.support.processes import TOKENHAUL

MODEL = "fake"
RUN = "bench"
_SIZES = 400


class Used(msgspec.Struct, frozen=True):
    """By a process, from start to end: CPU seconds (its children's too), wall seconds, resident sizes in bytes over
    time."""

    cpu: float
    seconds: float
    sizes: list[int]

    @property
    def peak(self) -> int:
        """The largest size."""
        return max(self.sizes)


class Stages:
    """A dataset of its own on the Kafka at `address`, made from `texts`, with everything it needs in `folder`."""

    def __init__(self, address: str, folder: Path, partitions: int, texts: Iterable[str]) -> None:
        self.folder = folder
        self.kafka = Kafka(KafkaSettings(bootstrap=[address], prefix=f"bench-{time.time_ns()}"))
        self.root = folder / "out"
        folder.mkdir(parents=True)
        with (folder / "prompts.jsonl").open("w") as file:
            for text in texts:
                file.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
        (folder / "sources.yaml").write_text("sources: [{name: bench, files: [prompts.jsonl], max_new_tokens: 512}]\n")
        asyncio.run(topics.create(self.kafka, topics.new_dataset("bench", MODEL, partitions), 1, 1))

    def run(self, name: str, **environ: str) -> Used:
        """Run one service until its part is done. With PROFILE=directory in the environment py-spy keeps its stacks."""
        self.log = self.folder / f"{name}.log"
        began = time.monotonic()
        with self.log.open("wb") as log:
            command = [*self._profiler(name), *TOKENHAUL, name, "--until-idle"]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self._settings() | environ
            )
            try:
                sizes, status, usage = _watch(process.pid)
            except BaseException:
                process.kill()
                raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{name} ended with status {process.returncode}:\n{self.log.read_text()[-2000:]}")
        return Used(usage.ru_utime + usage.ru_stime, time.monotonic() - began, sizes)

    def _settings(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(qwen3.ROOT),
            "TOKENHAUL_RUN_ID": RUN,
            "TOKENHAUL_LOG_LEVEL": "warning",
            "TOKENHAUL_METRICS_PORT": str(free_ports(1)[0]),
            "TOKENHAUL_KAFKA_BOOTSTRAP": self.kafka.address,
            "TOKENHAUL_KAFKA_PREFIX": self.kafka.settings.prefix,
            "TOKENHAUL_INGEST_SOURCES_FILE": str(self.folder / "sources.yaml"),
            "TOKENHAUL_INGEST_TOKENIZER": str(qwen3.directory()),
            "TOKENHAUL_SINK_ROOT": str(self.root),
        }

    @staticmethod
    def _profiler(name: str) -> list[str]:
        folder = os.environ.get("PROFILE")
        if not folder:
            return []
        Path(folder).mkdir(parents=True, exist_ok=True)
        stacks = str(Path(folder) / f"{name}.txt")
        return [str(Path(sys.executable).parent / "py-spy"), "record", "--format", "raw", "--output", stacks, "--"]


def _watch(pid: int) -> tuple[list[int], int, resource.struct_rusage]:
    """(resident sizes, exit status, usage) of a child, when it has ended. Its ru_maxrss would be ours if that is more,
    because it is kept over fork and exec."""
    sizes: list[int] = []
    wait = 0.05
    while True:
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):  # it is ending
            sizes.append(resident_bytes(pid))
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return sizes, status, usage
        time.sleep(wait)
        if len(sizes) == _SIZES:  # half as often from now on: evenly spread, and few
            del sizes[::2]
            wait *= 2


def texts(count: int, tokens: int) -> Iterable[str]:
    """`count` different prompts of about `tokens` tokens each, of real text."""
    ids = qwen3.python_text()
    pieces = qwen3.decode(qwen3.pieces(ids, tokens)[: min(count, len(ids) // tokens)])
    return (f"{number}: {piece}" for number, piece in enumerate(islice(cycle(pieces), count)))
