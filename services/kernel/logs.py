"""Logs on stderr: one JSON object a line, or a short human form on a terminal."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal

_about: ContextVar[Mapping[str, object]] = ContextVar("about", default=MappingProxyType({}))
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """What was given as `extra`, and what the task is `about`, become keys of the object, beside time, level, logger
    and message. What was done is the `action`; lines about a record name its topic, partition, offset and id."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """time level logger: message key=value ..."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={value}" for key, value in _extra(record).items())
        return super().format(record) + pairs


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {**_about.get(), **{key: value for key, value in vars(record).items() if key not in _STANDARD}}


def about(**keys: object) -> None:
    """All lines of this task, and of those it starts, are about this: topic, partition, offset, record."""
    _about.set({**_about.get(), **keys})


def configure(form: Literal["auto", "json", "human"], level: str) -> None:
    """Set up the root logger of this process."""
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(HumanFormatter() if human else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # aiokafka logs every attempt at a broker that is away, by the dozen a second. Our own lines say that it is away,
    # and what a listener raises ends the service (services/kernel/partitions.py).
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
