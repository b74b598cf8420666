"""Outcomes as they arrive at the sink, shards made of them, and a store in memory."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from aiokafka import ConsumerRecord

from schemas import ids
from schemas.control import Dataset
from schemas.sequences import Failure, FailureReason, Outcome
from schemas.sequences import Sequence as FinishedSequence
from services.kernel.codec import Encoder, schema_of
from services.kernel.store import Data, LocalStore
from services.sink.arrivals import Reader
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim
from tests.support.stream import MODEL, PARTITIONS, make_prompt

DATASET = Dataset(name="test", model=MODEL, partitions=PARTITIONS, created_at=1.0)
TOPIC = "test.sequences"
STOP = 2


def make_sequence(number: int, output_ids: Sequence[int] = (7, 8, STOP), **changes: Any) -> FinishedSequence:
    """The sequence of prompt `number`; `changes` replace fields of the sequence, or of the prompt as prompt=dict."""
    prompt = msgspec.structs.replace(make_prompt(number), created_at=1_700_000_000.25, **changes.pop("prompt", {}))
    made = FinishedSequence(
        prompt=prompt,
        output_ids=list(output_ids),
        finish_reason="stop",
        matched_stop=STOP,
        rids=["0" * 32],
        attempts=1,
        effective_max_new_tokens=64,
        segments=[len(output_ids)],
        latency_seconds=0.5,
        generated_at=1_700_000_001.5,
    )
    return msgspec.structs.replace(made, **changes)


def make_failure(number: int, reason: FailureReason = FailureReason.ENGINE_REJECTED) -> Failure:
    """The failure of prompt `number`."""
    prompt = make_prompt(number)
    return Failure(id=prompt.id, reason=reason, detail="no", prompt=prompt, failed_at=1_700_000_002.0)


def numbers_in(partition: int, count: int) -> list[int]:
    """Numbers of prompts that belong to `partition`."""
    found: list[int] = []
    number = 0
    while len(found) < count:
        if ids.partition(make_prompt(number).id, PARTITIONS) == partition:
            found.append(number)
        number += 1
    return found


def record(
    value: Outcome | bytes, offset: int, partition: int = 0, headers: Sequence[tuple[str, bytes]] | None = None
) -> ConsumerRecord:
    """`value` at a place in the sequences topic."""
    if not isinstance(value, bytes):
        headers = headers if headers is not None else [("schema", schema_of(value)), ("id", value.record_id)]
        value = Encoder().encode(value)
    return ConsumerRecord(TOPIC, partition, offset, 0, 0, None, value, None, 0, len(value), tuple(headers or ()))


def fill(buffer: Buffer, chain: Chain, outcomes: Iterable[Outcome | bytes], partition: int = 0) -> Buffer:
    """Let `outcomes` arrive in `buffer`, from its end on."""
    records = [record(outcome, buffer.end + n, partition) for n, outcome in enumerate(outcomes)]
    if records:
        buffer.add(Reader(DATASET).read(records)[partition], chain.seen, 1.0)
    return buffer


def write_dataset(root: Path, shards: Sequence[Sequence[Outcome | bytes]], partition: int = 0) -> Path:
    """A dataset under `root` whose `partition` has one shard for each of `shards`; its directory."""
    store = LocalStore(root)
    claim(store, DATASET)
    chain = Chain(store, DATASET, partition, "writer")
    for outcomes in shards:
        assert chain.commit(fill(Buffer(chain.tail, chain.last_id), chain, outcomes, partition))
    return root / DATASET.name


class MemoryStore:
    """A store that lives as long as the test."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, key: str, data: Data) -> bool:
        with self._lock:
            return self.objects.setdefault(key, mine := bytes(data)) is mine

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.objects[key])

    def list(self, folder: str) -> list[str]:
        return sorted(key.removeprefix(f"{folder}/") for key in self.objects if key.startswith(f"{folder}/"))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def sweep(self) -> None:
        """Nothing is ever left behind."""

    def name(self, key: str) -> str:
        return f"memory:{key}"
