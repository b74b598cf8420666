"""The topics of a run, decoded by the formats as documented: ours are zstd frames of msgpack maps, Kafka's own
__consumer_offsets is described by its OffsetCommitKey.json and OffsetCommitValue.json.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zstandard
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.chaos.facts import Commit, Event, Prompt

_OFFSET_COMMIT, _GROUP_METADATA = (0, 1), 2


async def read_topics(bootstrap: list[str], prefix: str) -> tuple[list[Prompt], list[Commit], list[Event]]:
    """(prompts, the generators' commits, their rebalances)."""
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
