"""Child processes that never outlive their parent, are started again when they are killed, and end in order."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from services.kernel.errors import Fatal, SettingsError

_PR_SET_PDEATHSIG = 1
_MOST_RESTARTS = 10


class _LastLine(msgspec.Struct):
    """What a service that ends for good logs last."""

    level: Literal["critical"]
    message: str


def _die_with_parent() -> None:
    """Linux: the kernel kills this child when its parent is gone, even by kill -9."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One process and its log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self.restarts = 0
        self._command, self._environ = list(command), dict(environ)
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the process running now."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    @property
    def done(self) -> bool:
        """It ended by itself, with status 0."""
        return self._process.poll() == 0

    def keep_running(self) -> bool:
        """Start it again if it was killed; True if that was so. Raises Fatal or SettingsError as it did, when starting
        again would not help."""
        status = self._process.poll()
        if status in (None, 0):
            return False
        if status == SettingsError.status:
            raise SettingsError(self.tail().replace("tokenhaul: ", ""))
        if status == Fatal.status and (why := self._why_fatal()):
            raise Fatal(f"{self.name} cannot go on: {why}\n(its log: {self.log})")
        if status == Fatal.status or self.restarts >= _MOST_RESTARTS:
            raise Fatal(f"{self.name} ended with status {status}; the end of {self.log}:\n{self.tail()}")
        self.restarts += 1
        self._process = self._start()
        return True

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def _why_fatal(self) -> str:
        """The message of the line a service ends with (services/kernel/lifecycle.py); empty when there is none."""
        *_, last = self.log.read_text(errors="replace").splitlines() or [""]
        try:
            return msgspec.json.decode(last, type=_LastLine).message
        except msgspec.MsgspecError:
            return ""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait_or_kill(self, deadline: float) -> None:
        """Return when it is gone; at `deadline` (time.monotonic) it is killed."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C goes to the parent alone, which ends its children in order.
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip


def end(children: Sequence[Child], seconds: float) -> None:
    """End `children` together, within `seconds`. Safe to call again."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.terminate()
    for child in children:
        child.wait_or_kill(deadline)
