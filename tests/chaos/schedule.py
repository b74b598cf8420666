"""Which faults happen when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

SERVICES = ("ingest", "generate-0", "generate-1", "sink-0", "sink-1")
ENGINES = ("engine-0", "engine-1")
BROKERS = ("kafka-1", "kafka-2", "kafka-3")
FAILPOINTS = {
    "ingest": ("transaction.begun", "transaction.sent", "transaction.ended"),
    "generate": ("publish.before", "publish.after", "commit.before", "commit.after"),
    "sink": ("create.before", "create.written", "create.linked", "create.after", "commit.before", "commit.after"),
}
ENGINE_FAULTS = (
    '{"type":"Abort","after":3}',
    '{"type":"Drop"}',
    '{"type":"Reset"}',
    '{"type":"QueueFull"}',
    '{"type":"Status","status":500,"body":"out of luck"}',
    '{"type":"Status","status":429,"headers":{"Retry-After":"1"}}',
    '{"type":"Drip","seconds":0.2}',
    '{"type":"Latency","seconds":4.0}',
)
_BROKER_REST = 20.0


class Fault(NamedTuple):
    """At `at` seconds `kind` happens to `target`; it lasts `seconds`. `detail` depends on the kind."""

    at: float
    kind: str
    target: str
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:7.1f} s  {self.kind} {self.target}{lasts} {self.detail}".rstrip()


def schedule(seed: int, seconds: float, every: float) -> list[Fault]:
    """About one fault in `every` seconds, for `seconds`."""
    return list(_faults(random.Random(seed), seconds, every))


def _faults(chance: random.Random, seconds: float, every: float) -> Iterator[Fault]:
    at, brokers_rest_until = every, 0.0
    while at < seconds:
        if at >= brokers_rest_until and chance.random() < 0.2:
            fault = _broker_fault(chance, at)
            # Before another broker suffers this one is back and has caught up: more is a lost Kafka, not a fault.
            brokers_rest_until = at + fault.seconds + _BROKER_REST
        else:
            fault = _fault(chance, at)
        yield fault
        at += chance.uniform(0.4, 1.6) * every


def _fault(chance: random.Random, at: float) -> Fault:
    kind = chance.choices(("kill", "failpoint", "freeze", "restart", "engine"), (5, 5, 3, 3, 4))[0]
    if kind == "engine":
        script = ",".join(chance.choices(ENGINE_FAULTS, k=chance.randint(1, 12)))
        return Fault(at, kind, chance.choice(ENGINES), detail=f"[{script}]")
    if kind == "failpoint":
        service = chance.choice(SERVICES)
        place = chance.choice(FAILPOINTS[service.partition("-")[0]])
        return Fault(at, kind, service, detail=f"{place}=kill@{chance.randint(1, 6)}")
    target = chance.choice(SERVICES + ENGINES)
    seconds = 0.0
    if kind == "freeze":  # a moment, or beyond the session timeout
        seconds = chance.choice((chance.uniform(0.5, 3.0), chance.uniform(8.0, 14.0)))
    elif kind == "kill" and target in ENGINES:
        seconds = chance.uniform(0.0, 8.0)
    return Fault(at, kind, target, seconds)


def _broker_fault(chance: random.Random, at: float) -> Fault:
    kind = chance.choices(("kill", "restart", "freeze", "isr", "elect"), (4, 2, 3, 1, 1))[0]
    seconds = {"freeze": chance.uniform(2.0, 12.0), "isr": chance.uniform(5.0, 15.0)}.get(kind, chance.uniform(0, 6))
    return Fault(at, kind, chance.choice(BROKERS), seconds)
