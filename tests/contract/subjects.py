"""The engines the contract is tested on: the local engine, the fake and, by its URL, a real SGLang server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
REAL_URL = "SGLANG_TEST_URL"
OWN = ["fake", "local"]  # started here, so that options and signals can be tested
NAMES = [*OWN, *(["sglang"] if REAL_URL in os.environ else [])]
SMOLLM2 = [name for name in NAMES if name != "fake"]  # the model of the recordings: its ids can be compared
CONTEXT = 512
VOCAB_SIZE = 49152

COMMANDS = {
    "fake": ["-m", "tests.support.fake_engine", "--token-seconds", "0.005"],
    "local": ["-m", "services.cli", "engine"],
}


@dataclass(frozen=True)
class Subject:
    """A running engine. `context` is what a request may have; a server not started here has no `process`."""

    name: str
    url: str
    context: int
    process: subprocess.Popen[str] | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """To our own process only."""
        assert self.process is not None
        self.process.send_signal(number)

    async def exit_status(self) -> int:
        """Wait for the process to end."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, 30)


@contextmanager
def started(name: str, *options: str) -> Iterator[Subject]:
    """A local or fake engine on a free port, ended by its pid."""
    command = [sys.executable, *COMMANDS[name], "--port", "0", "--context", str(CONTEXT), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # printed when it is ready; empty when it died
            assert line, f"the {name} engine ended with {process.wait()} before it was ready"
            yield Subject(name, json.loads(line)["url"], CONTEXT, process)
        finally:
            process.kill()


def client_of(subject: Subject) -> httpx.AsyncClient:
    """A client that waits as long as a slow machine needs."""
    return httpx.AsyncClient(base_url=subject.url, timeout=100)


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll until the condition holds; the deadline only ends a test that hangs."""
    async with asyncio.timeout(60):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.005)
