"""Processes as a user starts and kills them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.local.processes import Child, end
from services.local.run import LOCAL_TOKENIZER

TOKENHAUL = [sys.executable, "-m", "services.cli"]
_started: list[subprocess.Popen[str]] = []


@contextmanager
def fake_engine(folder: Path, *arguments: str) -> Iterator[tuple[str, Path]]:
    """A fake engine as a process: (its URL, its log of every start and end of a generation).

    It has the tokenizer of the local model, because generators refuse an engine whose tokenizer is not ingest's."""
    log = folder / "engine.jsonl"
    child = Child(
        "fake engine",
        [
            sys.executable,
            "-m",
            "tests.support.fake_engine",
            "--log",
            str(log),
            "--tokenizer",
            str(LOCAL_TOKENIZER),
            *arguments,
        ],
        folder / "engine.out",
        os.environ,
    )
    try:
        wait_for(lambda: b"\n" in (folder / "engine.out").read_bytes(), 30)
        yield msgspec.json.decode((folder / "engine.out").read_bytes().splitlines()[-1])["url"], log
    finally:
        end([child], 10)


def tokenhaul(*arguments: object, **environ: str) -> subprocess.Popen[str]:
    """`tokenhaul ...`, its output in a pipe (both kinds in one). It ends with the test at the latest."""
    process = subprocess.Popen(
        [*TOKENHAUL, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | environ,
    )  # fmt: skip
    _started.append(process)
    return process


def end_all() -> None:
    """Kill what a failed test has left running."""
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def children(pid: int) -> dict[str, int]:
    """{subcommand: pid} of the services and engines that process `pid` has started, by their command lines."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if "services.cli" in words:
                found[words[words.index("services.cli") + 1]] = int(child)
            elif "kafka.Kafka" in words:
                found["kafka"] = int(child)
    return found


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Return when `condition` holds; fail when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
