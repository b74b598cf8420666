"""What the judge knows of a run: plain values, whatever they were read from."""

from __future__ import annotations

from typing import Any, NamedTuple


class Prompt(NamedTuple):
    """A prompt as committed to the prompts topic."""

    id: str
    prompt_ids: tuple[int, ...]
    partition: int
    offset: int
    text: str


class Commit(NamedTuple):
    """A commit of the generators' group: what is done of a partition."""

    at: float
    partition: int
    watermark: int
    high: int
    pending: frozenset[int]

    def covers(self, offset: int) -> bool:
        """Whether `offset` is done according to it."""
        return offset < self.watermark or (offset < self.high and offset not in self.pending)


class Shard(NamedTuple):
    """A shard: its place in the chain, its rows, its failures."""

    name: str
    partition: int
    start: int
    end: int
    rows: list[dict[str, Any]]
    failures: list[tuple[str, str]]
    superseded: list[str]


SLOW = frozenset({"Latency", "Drip"})
"""Faults whose answer is right, and paid for."""


class Generation(NamedTuple):
    """What an engine was asked, and what it made of it; `ended` None: it never came to an end."""

    rid: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    started: float
    ended: float | None
    fault: str | None
    aborted: bool

    @property
    def spoilt(self) -> bool:
        """A fault was asked for that leaves no answer to use."""
        return self.fault is not None and self.fault not in SLOW

    @property
    def gave_nothing(self) -> bool:
        """Nobody can have got an answer of it."""
        return self.ended is None or self.aborted or self.spoilt


class Event(NamedTuple):
    """What was done to the system, or came of it. `until` is when a pause or an outage was over."""

    kind: str
    target: str
    at: float
    until: float


class Evidence(NamedTuple):
    """All of it."""

    lines: list[str]
    prompts: list[Prompt]
    shards: list[Shard]
    damaged: list[str]
    generations: list[Generation]
    torn: int
    """Lines of the engines' logs that cannot be read."""
    commits: list[Commit]
    events: list[Event]
