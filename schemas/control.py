"""Messages of the topic `<prefix>.control` (compacted): what all services of a dataset must agree on."""

from __future__ import annotations

import msgspec

DATASET_KEY = b"dataset"


class Dataset(msgspec.Struct, tag="dataset.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Frozen by `tokenhaul topics create`: records of one id meet in one partition only while these stay."""

    name: str
    model: str
    partitions: int
    created_at: float


class SourceTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ingest did with a source since its beginning: records published, already there, refused by reason; and why
    it stopped before the source's end, if it did."""

    published: int = 0
    repeated: int = 0
    refused: dict[str, int] = {}
    stopped: str = ""


class Idle(msgspec.Struct, tag="idle.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Ingest of run `run` has published all its sources hold: nothing follows until somebody starts it again."""

    run: str
    sources: dict[str, SourceTotals]
    created_at: float


class Cancel(msgspec.Struct, tag="cancel.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Prompts of `source` created before `created_at` and not generated yet are to fail as cancelled."""

    source: str
    created_at: float


class Halt(msgspec.Struct, tag="halt.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Whether the generators may take in prompts. An epoch begins with `tokenhaul resume`; budgets count within one."""

    halted: bool
    epoch: int
    reason: str = ""
    created_at: float


class Spent(msgspec.Struct, tag="spent.v1", frozen=True, kw_only=True, omit_defaults=True):
    """What one generator has made in an epoch. The sum over all is what a budget is held against. `stopped`: it obeys
    the halt of that epoch and has nothing in flight any more."""

    member: str
    epoch: int
    rows: int
    output_tokens: int
    since: float
    stopped: bool = False


class Probe(msgspec.Struct, frozen=True):
    """A text and the ids ingest's tokenizer makes of it, without special tokens of its own."""

    text: str
    ids: list[int]


class Probes(msgspec.Struct, tag="probes.v1", frozen=True, kw_only=True, omit_defaults=True):
    """What an engine's tokenizer must agree with. An engine that does not serves another model than it says."""

    tokenizer_fingerprint: str
    probes: list[Probe]


class Regenerated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a command: prompts that stand on the topic for it, ids that no prompt on the topic had, and
    prompts that were left out since a higher revision of theirs stands there already."""

    prompts: int
    missing: int
    skipped: int = 0
    done_at: float


class Regenerate(msgspec.Struct, tag="regenerate.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Ask the prompts with these ids (16 bytes each, one after the other) again as `revision`, with another
    max_new_tokens if one is given. Ingest replaces it by one that is `done` and has no ids any more."""

    command: str
    ids: bytes
    revision: int
    max_new_tokens: int | None = None
    reason: str
    created_at: float
    done: Regenerated | None = None


class Replay(msgspec.Struct, tag="replay.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Ask the failed prompts with these record ids (16 bytes each, one after the other) again, as they are. Letters
    of theirs written before `created_at` are settled. Ingest replaces it by one that is `done`."""

    command: str
    ids: bytes
    created_at: float
    done: Regenerated | None = None


class Drop(msgspec.Struct, tag="drop.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Nobody is to be shown the dead letters with these keys written before `created_at` any more."""

    command: str
    keys: list[bytes]
    created_at: float


Control = Dataset | Idle | Cancel | Halt | Spent | Probes | Regenerate | Replay | Drop

HALT_KEY = b"halt"
PROBES_KEY = b"probes"


def cancel_key(source: str) -> bytes:
    """The key of a source's cancellation."""
    return f"cancel/{source}".encode()


def spent_key(member: str) -> bytes:
    """The key of what a generator process has made."""
    return f"spent/{member}".encode()


def idle_key(run: str) -> bytes:
    """The key of a run's idle mark."""
    return f"idle/{run}".encode()


def replay_key(command: str) -> bytes:
    """The key of a command to ask failed prompts again."""
    return f"replay/{command}".encode()


def drop_key(command: str) -> bytes:
    """The key of a command to drop dead letters."""
    return f"drop/{command}".encode()


def regenerate_key(command: str) -> bytes:
    """The key of a command to ask prompts again."""
    return f"regenerate/{command}".encode()
