"""The directory of an export: what was asked for, how far it is, whether it is done."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.dataset.snapshot import Snapshot
from services.kernel.errors import SettingsError

CARD = "README.md"
"""Written last: a directory without one is not done."""

STATE = ".export"
SPILL, COUNTS = f"{STATE}/spill", f"{STATE}/counts"
_PLAN, _LOCK = f"{STATE}/plan", f"{STATE}/lock"  # no .json: loaders take all of that kind they find
_VERSION = 2


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is exported. The same plan gives the same files, byte for byte."""

    version: int = _VERSION
    format: str
    asked: dict[str, object]
    snapshot: Snapshot
    since: Snapshot | None


@contextmanager
def begun(out: Path, plan: Plan) -> Iterator[Plan]:
    """The plan to follow: the one that was begun in `out`, or `plan`. Raises SettingsError when another was, and when
    another process follows it now."""
    if out.exists() and any(out.iterdir()) and not (out / STATE).exists():
        raise SettingsError(f"--out {out} is not empty, and no export was begun there: take another directory")
    (out / STATE).mkdir(parents=True, exist_ok=True)
    with (out / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it for who is killed
        except OSError as error:
            raise SettingsError(f"another export works in --out {out}") from error
        yield _begin(out, plan)


def tidy(out: Path) -> None:
    """Remove what an export that is done needs no more."""
    for name in (SPILL, COUNTS):
        shutil.rmtree(out / name, ignore_errors=True)


def _begin(out: Path, plan: Plan) -> Plan:
    file = out / _PLAN
    if file.exists() and ((out / CARD).exists() or (out / SPILL).exists()):
        found = msgspec.json.decode(file.read_bytes(), type=Plan)
        if (found.version, found.format, found.asked) != (plan.version, plan.format, msgspec.to_builtins(plan.asked)):
            raise SettingsError(f"--out {out} holds another export, or one that was asked for otherwise: take another")
        return found
    # Nothing was written yet: whoever was refused for a misspelt name may ask otherwise.
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(plan))
    os.replace(temporary, file)
    return plan
