"""docs/getting-started.md, to the letter: its blocks of commands, but for ports and the directory they write to."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from services.local.kafka import free_ports
from services.local.processes import Child, end
from tests.k8s.manifests import ROOT
from tests.support.processes import wait_for

pytestmark = pytest.mark.long

_BLOCK = r"<!-- tried by tests/e2e/test_getting_started\.py: {name} -->\n```sh\n(.*?)```"
_PORTS = ("9092", "30000", "9464", "9465", "9466")


class Reader:
    """Who does what the page says, in a directory of their own and on ports that are free."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._page = (ROOT / "docs" / "getting-started.md").read_text()
        self._ports = dict(zip(_PORTS, map(str, free_ports(len(_PORTS))), strict=True))
        self._exports = ""
        self._children: list[Child] = []

    def commands(self, name: str) -> list[str]:
        """The lines of a block."""
        (text,) = re.findall(_BLOCK.format(name=name), self._page, re.DOTALL)
        text = re.sub(r"\b(9092|30000|9464|9465|9466)\b", lambda found: self._ports[found[0]], text)
        text = text.replace("out/", f"{self._folder}/")
        text = text.replace(".venv/bin/tokenhaul", f"{sys.executable} -m services.cli")
        return text.strip().splitlines()

    def start(self, name: str) -> None:
        """A terminal for each line."""
        for number, line in enumerate(self.commands(name)):
            command = ["sh", "-c", f"{self._exports}exec env {line}"]
            self._children.append(Child(name, command, self._folder / f"{name}-{number}.log", os.environ))

    def run(self, name: str) -> str:
        """One line after the other; all they print."""
        said = ""
        for line in self.commands(name):
            if line.startswith("export "):
                self._exports += f"{line}; "
                continue
            done = subprocess.run(
                ["sh", "-c", self._exports + line], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            said += done.stdout
        return said

    def listens(self, *ports: str) -> bool:
        """Whether somebody does, at all of the page's `ports`."""
        for child in self._children:
            child.keep_running()  # raises for one that ended because something is wrong
        return all(map(self._answers, ports))

    def _answers(self, port: str) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self._ports[port]))) == 0

    def close(self) -> None:
        """All terminals, the first one last."""
        for child in reversed(self._children):
            end([child], 20)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


def test_the_services_one_by_one(reader: Reader, tmp_path: Path) -> None:
    reader.start("infrastructure")
    wait_for(partial(reader.listens, "9092", "30000"), 120)
    assert "dataset demo" in reader.run("topics")
    reader.start("services")
    wait_for(partial(reader.listens, "9464", "9465", "9466"), 60)
    wait_for(lambda: any(tmp_path.glob("services/demo/partition=*/*.parquet")), 120)
    said = reader.run("tools")
    for seen in (r"[1-9]\d* rows in shards", r"^\s*messages +\d+", r"tools_ignored", r"<\|im_start\|>"):
        assert re.search(seen, said, re.MULTILINE), f"{seen!r} is not in:\n{said}"
