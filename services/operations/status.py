"""How far the pipeline is, at one moment. What cannot be known is None, and said to be so; nothing is guessed."""

from __future__ import annotations

import msgspec


class Source(msgspec.Struct, kw_only=True):
    """One source. `published` is what its files and pushes gave, without prompts that `tokenhaul regenerate` asked
    again; `done` counts the rows and failures in shards of all of them, so it may be more. `refused` was never
    published. `dead` counts the letters nobody has settled, `failed` those of them that are of published prompts."""

    published: int = 0
    done: int | None = None
    dead: int = 0
    failed: int = 0
    refused: int = 0
    share: float | None = None
    per_second: float | None = None
    seconds_left: float | None = None


class Engine(msgspec.Struct, kw_only=True):
    """One engine as the generators see it."""

    ready: bool
    in_flight: int
    window: int
    running: int
    waiting: int
    kv_use: float
    requests_per_second: float | None = None
    tokens_per_second: float | None = None


class Partition(msgspec.Struct, kw_only=True):
    """`prompts` wait for an outcome, `outcomes` for their shard; the chain ends at `tail`."""

    prompts: int
    outcomes: int
    tail: int


class Status(msgspec.Struct, kw_only=True):
    """All of it, at one moment. Rates are per second."""

    at: float
    dataset: str
    model: str
    halted: str | None
    sources: dict[str, Source]
    engines: dict[str, Engine]
    partitions: dict[int, Partition]
    dead: dict[str, int]
    waiting_prompts: int
    waiting_outcomes: int
    outcomes_per_second: float | None = None
    output_tokens_per_second: float | None = None
    seconds_left: float | None = None
    rows: int | None = None
    discarded: int | None = None
    unreachable: dict[str, str] = {}
    shards_unread: str | None = None
    """Why rows were not counted in the store although they were to be."""
