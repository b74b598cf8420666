"""Datasets on disk as the sink would have written them, over all partitions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from schemas import ids
from schemas.sequences import Outcome, Sequence
from services.kernel.store import LocalStore, Store
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim
from tests.support.outcomes import DATASET, fill, make_sequence
from tests.support.stream import MODEL, PARTITIONS


def append(root: Path | Store, outcomes: Iterable[Outcome]) -> str:
    """Add a shard to every partition that `outcomes` belong to; the dataset's name."""
    store = LocalStore(root) if isinstance(root, Path) else root
    claim(store, DATASET)
    homes: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        homes.setdefault(ids.partition(outcome.record_id, PARTITIONS), []).append(outcome)
    for partition, own in homes.items():
        chain = Chain(store, DATASET, partition, "writer")
        chain.refresh()
        assert chain.commit(fill(Buffer(chain.tail, chain.last_id), chain, own, partition))
    return DATASET.name


def asked_again(sequence: Sequence, revision: int, output_ids: list[int], **changes: Any) -> Sequence:
    """The outcome of the same request in a later revision."""
    prompt = sequence.prompt
    id = ids.record_id(prompt.prompt_ids, MODEL, prompt.sampling, prompt.sample_index, revision)
    prompt = msgspec.structs.replace(prompt, id=id, seed=ids.seed(id), revision=revision)
    return msgspec.structs.replace(
        sequence, prompt=prompt, output_ids=output_ids, segments=[len(output_ids)], **changes
    )


def sequences(count: int, first: int = 0, **changes: Any) -> list[Sequence]:
    """The sequences of so many prompts."""
    return [make_sequence(number, **changes) for number in range(first, first + count)]
