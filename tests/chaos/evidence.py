"""What a run has left behind, read without any code of the services: topics, shards, the engines' logs, the journal.

Formats are taken from docs and schemas/json: values on topics are zstd frames of msgpack maps.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

_OFFSET_COMMIT, _GROUP_METADATA = (0, 1), 2


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
    def gave_nothing(self) -> bool:
        """Nobody can have got an answer of it."""
        return self.ended is None or self.aborted or self.fault is not None


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
    commits: list[Commit]
    events: list[Event]


def read(bootstrap: list[str], prefix: str, dataset: Path, engines: Iterable[Path], sources: Iterable[Path],
         journal: Path) -> Evidence:  # fmt: skip
    """Everything, once the run is over."""
    prompts, commits, rebalances = asyncio.run(_topics(bootstrap, prefix))
    shards, damaged = read_shards(dataset)
    return Evidence(
        lines=[json.loads(line)["prompt"] for path in sources for line in path.read_bytes().splitlines()],
        prompts=prompts,
        shards=shards,
        damaged=damaged,
        generations=read_generations(engines),
        commits=commits,
        events=sorted([*read_journal(journal), *rebalances], key=lambda event: event.at),
    )


def read_shards(dataset: Path) -> tuple[list[Shard], list[str]]:
    """(shards in order of their chains, what cannot be read)."""
    shards, damaged = [], []
    for path in sorted(dataset.glob("partition=*/*")):
        name = str(path.relative_to(dataset))
        try:
            file = pq.ParquetFile(path)
            footer = json.loads((file.metadata.metadata or {})[b"tokenhaul"])
            rows = file.read(columns=["id", "input_ids", "prompt_length", "rids", "kafka_offset"]).to_pylist()
            shards.append(
                Shard(
                    name, footer["partition"], footer["start"], footer["end"], rows,
                    [(id, reason) for id, reason in footer["failures"]], footer["superseded"],
                )
            )  # fmt: skip
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            damaged.append(f"{name}: {error!r}")
    return shards, damaged


def read_generations(logs: Iterable[Path]) -> list[Generation]:
    """Of all engines, in order of their starts. A last line cut short by a kill is left out."""
    started: dict[str, dict[str, Any]] = {}
    ended: dict[str, dict[str, Any]] = {}
    for log in logs:
        for line in log.read_bytes().splitlines() if log.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            (started if entry["type"] == "Started" else ended)[entry["rid"]] = entry
    found = []
    for rid, entry in started.items():
        end = ended.get(rid)
        reason = ((end or {}).get("finish_reason") or {}).get("type")
        found.append(
            Generation(
                rid=rid,
                input_ids=tuple(entry["input_ids"]),
                output_ids=tuple(end["output_ids"]) if end else (),
                started=entry["at"],
                ended=end["at"] if end else None,
                fault=entry["fault"],
                aborted=reason not in ("stop", "length"),
            )
        )
    return sorted(found, key=lambda generation: generation.started)


def read_journal(path: Path) -> list[Event]:
    """What the run noted down of its own doings."""
    return [Event(*json.loads(line)) for line in path.read_text().splitlines()]


async def _topics(bootstrap: list[str], prefix: str) -> tuple[list[Prompt], list[Commit], list[Event]]:
    prompts = []
    async for record in _records(bootstrap, f"{prefix}.prompts"):
        value = unpack(record.value)
        prompts.append(
            Prompt(value["id"].hex(), tuple(value["prompt_ids"]), record.partition, record.offset, _text(value))
        )
    commits, rebalances = [], []
    group = f"{prefix}.generator"
    async for record in _records(bootstrap, "__consumer_offsets"):
        if not record.key or record.value is None:
            continue
        (kind,) = struct.unpack_from(">h", record.key)
        name, rest = _string(record.key, 2)
        if name != group:
            continue
        if kind == _GROUP_METADATA:
            rebalances.append(Event("rebalance", name, record.timestamp / 1000, record.timestamp / 1000))
        elif kind in _OFFSET_COMMIT:
            topic, rest = _string(record.key, rest)
            (partition,) = struct.unpack_from(">i", record.key, rest)
            if topic == f"{prefix}.prompts":
                commits.append(_commit(record.timestamp / 1000, partition, record.value))
    return prompts, commits, rebalances


def unpack(value: bytes) -> Any:
    """A value of one of our topics."""
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(value))


def _text(prompt: dict[str, Any]) -> str:
    messages = prompt.get("messages")
    messages = json.loads(messages) if isinstance(messages, str | bytes) else messages
    return str(messages[-1]["content"]) if messages else ""


async def _records(bootstrap: list[str], topic: str) -> AsyncIterator[ConsumerRecord]:
    """Every committed record there is now."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        (described,) = await admin.describe_topics([topic])
    finally:
        await admin.close()
    partitions = [TopicPartition(topic, partition["partition"]) for partition in described["partitions"]]
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest",
        max_partition_fetch_bytes=64 * 1024 * 1024,
    )  # fmt: skip
    await consumer.start()
    try:
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        behind = {partition for partition in partitions if ends[partition]}
        while behind:
            for records in (await consumer.getmany(*behind, timeout_ms=500)).values():
                for record in records:
                    yield record
            behind = {p for p in behind if await consumer.position(p) < ends[p]}
    finally:
        await consumer.stop()


def _commit(at: float, partition: int, value: bytes) -> Commit:
    """A value of __consumer_offsets (Kafka's OffsetCommitValue.json): since version 3 with a leader epoch, since
    version 4 with strings whose length is an unsigned varint, one more than it is."""
    version, offset = struct.unpack_from(">hq", value)
    if version < 4:
        metadata, _ = _string(value, 14 if version >= 3 else 10)
    else:
        begin, length, shift = 14, 0, 0
        while True:
            byte = value[begin]
            length |= (byte & 0x7F) << shift
            begin, shift = begin + 1, shift + 7
            if byte < 0x80:
                break
        metadata = value[begin : begin + length - 1].decode()
    return Commit(at, partition, offset, *pending(offset, metadata))


def pending(watermark: int, metadata: str) -> tuple[int, frozenset[int]]:
    """(high, pending offsets) of a commit's metadata: "1:" and base64 of LEB128 numbers: how far `high` lies beyond
    the watermark, then the gaps from each pending offset, of which the watermark is the first, to the next."""
    if not metadata:
        return watermark, frozenset()
    numbers, number, shift = [], 0, 0
    for byte in base64.b64decode(metadata.removeprefix("1:"), validate=True):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number, shift = 0, 0
    found, offset = [watermark], watermark
    for gap in numbers[1:]:
        offset += gap
        found.append(offset)
    return watermark + numbers[0], frozenset(found)


def _string(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from(">h", data, at)
    return data[at + 2 : at + 2 + length].decode(), at + 2 + length
