"""Every prompt on the topic against the dataset: it ended as a row or a failure, or something can still come of it.

Read in this order, while ingest, generators and sinks go on: what the generators have committed, where the sequences
topic ends, the chains, the sequences beyond the chains, the prompts. A generator commits a prompt after its outcome is
acknowledged: of a prompt that was committed at the beginning, the outcome lies before those ends, so it is in a chain
or on the topic beyond it. If it is in neither it is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import msgspec
import numpy as np
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from numpy.typing import NDArray

from schemas import ids
from schemas.control import Dataset
from schemas.sequences import FailureReason
from services.kernel.errors import Fatal
from services.kernel.groups import group_offsets
from services.kernel.kafka import Kafka
from services.kernel.seen import Ids, SeenIds, pack
from services.kernel.topics import frozen_dataset
from services.kernel.watermark import Tracker

_SHOWN = 20


class Accounts(msgspec.Struct, kw_only=True):
    """What became of the prompts that were committed to their topic. Each is in one of `rows`, `failures`, `landing`
    (its outcome is on the topic and in no shard yet), `waiting` (for a generator) and `missing`. `twice` are prompts
    that stand on the topic more than once (they count once) without having been `replayed` by command, `unasked`
    outcomes that no prompt asked for. Ids (hex) of up to twenty are named."""

    prompts: int = 0
    rows: int = 0
    failures: int = 0
    landing: int = 0
    waiting: int = 0
    missing: int = 0
    twice: int = 0
    replayed: int = 0
    unasked: int = 0
    missing_ids: list[str] = []
    twice_ids: list[str] = []

    def text(self) -> str:
        """For people."""
        return (
            f"{self.prompts} prompts on the topic: {self.rows} became rows, {self.failures} failures, {self.landing} "
            f"are on their way to a shard, {self.waiting} wait for a generator, {self.missing} are missing"
            + (f"; {self.replayed} were replayed" if self.replayed else "")
        )


class Auditor:
    """Made by `begin` before the chains are looked at. Memory holds the ids of one partition."""

    def __init__(
        self,
        kafka: Kafka,
        prompts: AIOKafkaConsumer,
        sequences: AIOKafkaConsumer,
        done: Mapping[int, Tracker],
        sequence_ends: Mapping[TopicPartition, int],
    ) -> None:
        self._kafka, self._prompts, self._sequences = kafka, prompts, sequences
        self._done, self._sequence_ends = done, sequence_ends
        self.accounts = Accounts()

    @classmethod
    async def begin(
        cls, kafka: Kafka, dataset: Dataset, prompts: AIOKafkaConsumer, sequences: AIOKafkaConsumer
    ) -> Auditor:
        """`prompts` is read_committed, `sequences` is not; both belong to no group. Raises Fatal when the topics are of
        another dataset."""
        frozen = await frozen_dataset(kafka)
        for field in ("name", "model", "partitions"):
            if getattr(frozen, field) != getattr(dataset, field):
                raise Fatal(
                    f"the topics {kafka.settings.prefix}.* are of {field} {getattr(frozen, field)!r}, the dataset of "
                    f"{getattr(dataset, field)!r}"
                )
        tps = _partitions(kafka.topics.prompts, dataset)
        async with kafka.started(kafka.admin) as admin:
            committed = await kafka.patiently(lambda: group_offsets(admin, kafka.topics.generator_group, tps))
        done = {partition: Tracker.restore(*value) for partition, value in committed.items()}
        ends = await sequences.end_offsets(_partitions(kafka.topics.sequences, dataset))
        return cls(kafka, prompts, sequences, done, ends)

    async def partition(self, number: int, tail: int, rows: SeenIds, failures: Mapping[str, str]) -> None:
        """Account for the prompts of a partition whose chain ends at `tail`. `failures` are those no row superseded."""
        accounts, landing = self.accounts, await self._landing(number, tail)
        prompts, failed = SeenIds(), SeenIds()
        failed.add(pack([bytes.fromhex(id) for id in failures]))
        ended = accounts.rows + accounts.failures
        tp = TopicPartition(self._kafka.topics.prompts, number)
        (begin,) = (await self._prompts.beginning_offsets([tp])).values()
        (end,) = (await self._prompts.end_offsets([tp])).values()
        done = self._done.get(number, Tracker(begin))
        async for records in _read(self._prompts, tp, begin, end):
            names = [_id(record) for record in records]
            packed = pack(names)
            first = ~prompts.contains(packed) & _first(packed)
            prompts.add(packed)
            found = zip(*(index.contains(packed).tolist() for index in (rows, failed, landing)), strict=True)
            for record, name, new, (a_row, a_failure, lands) in zip(records, names, first.tolist(), found, strict=True):
                if not new:
                    if "replay" in dict(record.headers):  # asked again by command, under its own id
                        accounts.replayed += 1
                        continue
                    accounts.twice += 1
                    _show(accounts.twice_ids, name)
                    continue
                accounts.prompts += 1
                if a_row:
                    accounts.rows += 1
                elif a_failure:
                    accounts.failures += 1
                elif lands:
                    accounts.landing += 1
                elif record.offset >= done.high or done.is_open(record.offset):
                    accounts.waiting += 1
                else:
                    accounts.missing += 1
                    _show(accounts.missing_ids, name)
        if not begin:  # else prompts were deleted, and nobody can know
            # What nobody could read may have an id made of its place.
            unreadable = sum(reason == FailureReason.UNDECODABLE for reason in failures.values())
            ended = accounts.rows + accounts.failures - ended
            accounts.unasked += max(0, len(rows) + len(failed) - unreadable - ended)

    async def _landing(self, number: int, tail: int) -> SeenIds:
        """Ids on the sequences topic beyond the chain."""
        landing = SeenIds()
        tp = TopicPartition(self._kafka.topics.sequences, number)
        (begin,) = (await self._sequences.beginning_offsets([tp])).values()
        async for records in _read(self._sequences, tp, max(begin, tail), self._sequence_ends[tp]):
            landing.add(pack([_id(record) for record in records]))
        return landing


def _partitions(topic: str, dataset: Dataset) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(dataset.partitions)]


def _id(record: ConsumerRecord) -> bytes:
    id = dict(record.headers).get("id", b"")
    return id if len(id) == ids.ID_BYTES else ids.origin_id(record.topic, record.partition, record.offset)


def _first(packed: Ids) -> NDArray[np.bool_]:
    """Where an id stands for the first time."""
    first = np.zeros(len(packed), np.bool_)
    first[np.unique(packed, axis=0, return_index=True)[1]] = True
    return first


def _show(shown: list[str], id: bytes) -> None:
    if len(shown) < _SHOWN:
        shown.append(id.hex())


async def _read(
    consumer: AIOKafkaConsumer, tp: TopicPartition, begin: int, end: int
) -> AsyncIterator[list[ConsumerRecord]]:
    consumer.assign([tp])
    consumer.seek(tp, begin)
    # A transaction marker is no record: only the position tells that the end is reached.
    while begin < end and await consumer.position(tp) < end:
        if records := (await consumer.getmany(tp, timeout_ms=500)).get(tp):
            yield [record for record in records if record.offset < end]
