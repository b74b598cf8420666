"""Named places where a fault test lets the process die, freeze or meet an error: TOKENHAUL_FAILPOINTS.

    TOKENHAUL_FAILPOINTS=create.linked=kill@3,commit.before=stop     # kill -9 at the third link; SIGSTOP at each commit

Without the variable a place costs one look at an empty mapping. With it the service says so at every start, as an
error, and refuses a place or an action it does not know.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Sequence

from services.kernel.errors import SettingsError

log = logging.getLogger("tokenhaul.failpoints")

VARIABLE = "TOKENHAUL_FAILPOINTS"
PLACES = {
    "create.before": "an object is about to be created, nothing is in the store",
    "create.written": "a local file is written under its temporary name, not linked",
    "create.linked": "a local file has its name, its folder is not yet durable",
    "create.put": "an object store has answered, nobody has looked at the object yet",
    "create.after": "a local file is there for good, the writer does not know it",
    "commit.before": "offsets are about to be committed",
    "commit.after": "offsets are committed, the service does not know it",
    "publish.before": "an outcome is about to be sent to Kafka",
    "publish.after": "an outcome is acknowledged, its prompt is not marked done",
    "transaction.begun": "a transaction is open, nothing was sent",
    "transaction.sent": "all is sent and acknowledged, the transaction is open",
    "transaction.ended": "the transaction is committed, ingest does not know it",
}
"""All places, with what holds there."""
_ITEM = re.compile(r"([a-z.]+)=(kill|stop|error)(?:@([1-9]\d*))?")

_armed: dict[str, tuple[str, int | None]] = {}
_passed: dict[str, int] = {}


def arm(items: Sequence[str]) -> None:
    """Switch on what `items` say: place=action or place=action@n, the n-th time only. Raises SettingsError."""
    _armed.clear()
    _passed.clear()
    for item in items:
        match = _ITEM.fullmatch(item)
        if match is None or match[1] not in PLACES or (match[2] == "error" and not match[1].startswith("create.")):
            raise SettingsError(
                f"{VARIABLE}={item!r} is not allowed: it takes PLACE=kill or PLACE=stop (create.*=error too), the n-th "
                f"time only with @n behind it; places are {', '.join(PLACES)}"
            )
        _armed[match[1]] = match[2], int(match[3]) if match[3] else None
    if _armed:
        log.error(
            "%s is set: this process will be made to fail on purpose at %s. Only tests do that", VARIABLE,
            ", ".join(_armed), extra={"action": "failpoints"},
        )  # fmt: skip


def passing(place: str) -> None:
    """The process is at `place` (one of PLACES). Raises OSError where a test wants that."""
    if not _armed:
        return
    action, at = _armed.get(place, ("", None))
    _passed[place] = _passed.get(place, 0) + 1
    if not action or at not in (None, _passed[place]):
        return
    if action == "error":
        raise OSError(f"failpoint {place}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
