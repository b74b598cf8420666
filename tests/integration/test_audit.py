"""`verify --audit` on a real Kafka: every prompt is accounted for, and what is missing has a name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from services.kernel.kafka import Kafka
from services.kernel.watermark import Tracker
from services.sink.service import Sink
from services.sink.settings import SinkSettings
from services.sink.verify import NothingToVerify, verify
from tests.support.outcomes import make_failure, make_sequence, write_dataset
from tests.support.processes import tokenhaul
from tests.support.stream import PARTITIONS, create_topics, eventually, make_prompt, publish, publish_outcomes, running

pytestmark = pytest.mark.long


async def commit(kafka: Kafka, done: Iterable[int]) -> None:
    """What a generator commits when the outcomes of these prompts are acknowledged."""
    finished = {make_prompt(number).id for number in done}
    trackers = {partition: Tracker(0) for partition in range(PARTITIONS)}
    async for record in kafka.read_all(kafka.topics.prompts):
        trackers[record.partition].deliver(record.offset)
        if dict(record.headers)["id"] in finished:
            trackers[record.partition].done(record.offset)
    group = kafka.topics.generator_group
    async with kafka.started(lambda: kafka.consumer(group, "read_committed")) as consumer:
        tps = {partition: TopicPartition(kafka.topics.prompts, partition) for partition in trackers}
        consumer.assign(list(tps.values()))
        await consumer.commit(
            {tps[p]: OffsetAndMetadata(tracker.watermark, tracker.metadata()) for p, tracker in trackers.items()}
        )


async def sink_all(kafka: Kafka, root: Path) -> None:
    """Until all that is on the topic is in shards."""
    sink = Sink(SinkSettings(root=str(root), max_age_seconds=0.2), kafka)
    ended = 0
    async for _ in kafka.read_all(kafka.topics.sequences, "read_uncommitted"):
        ended += 1

    async def all_there() -> bool:
        return await asyncio.to_thread(count, root) >= ended

    async with running(sink):
        await eventually(all_there, 90)


def count(root: Path) -> int:
    """Outcomes in shards."""
    if not (root / "test" / "_dataset.json").exists():
        return 0
    report = verify(root)
    return report.rows + sum(report.failures.values()) + report.duplicates + report.superseded


async def test_every_prompt_is_accounted_for(kafka: Kafka, tmp_path: Path) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(40)])
    rows, failures, landing, lost = range(20), range(20, 24), range(24, 27), range(27, 30)
    await publish_outcomes(
        kafka, [make_sequence(n) for n in rows] + [make_failure(n) for n in failures] + [make_failure(3)]
    )
    await sink_all(kafka, tmp_path)
    await publish_outcomes(kafka, [make_sequence(number) for number in landing])
    await commit(kafka, [*rows, *failures, *landing, 39])

    report = await asyncio.to_thread(verify, tmp_path, kafka=kafka)
    accounts = report.accounts
    assert accounts is not None
    assert (accounts.prompts, accounts.rows, accounts.failures, accounts.landing) == (40, 20, 4, 3)
    assert (accounts.waiting, accounts.missing, accounts.twice, accounts.unasked) == (12, 1, 0, 0)
    missing = make_prompt(39).id.hex()
    assert [str(problem) for problem in report.problems] == [
        f"prompt {missing} was answered, but neither the dataset nor the topic has its outcome"
    ]

    await commit(kafka, [*rows, *failures, *landing, *lost])  # they were said to be done, and nobody has them
    await publish(kafka, [make_prompt(5)])
    await publish_outcomes(kafka, [make_sequence(77)])
    await sink_all(kafka, tmp_path)
    environ = {"TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address, "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix}
    process = tokenhaul("verify", tmp_path, "--audit", **environ)
    printed, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "40 prompts on the topic: 23 became rows, 4 failures, 0 are on their way to a shard, 10 wait" in printed
    for number in lost:
        assert f"prompt {make_prompt(number).id.hex()} was answered, but neither" in printed
    assert f"prompt {make_prompt(5).id.hex()} stands on the topic more than once" in printed
    assert "1 outcomes are of no prompt on the topic" in printed
    assert "5 problems" in printed


async def test_before_anything_was_generated_all_wait(kafka: Kafka, tmp_path: Path) -> None:
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(10)])
    write_dataset(tmp_path, [])
    report = await asyncio.to_thread(verify, tmp_path, kafka=kafka)
    assert report.ok
    assert report.accounts is not None
    assert (report.accounts.prompts, report.accounts.waiting) == (10, 10)


async def test_topics_of_another_dataset_are_refused(kafka: Kafka, tmp_path: Path) -> None:
    await create_topics(kafka)
    directory = write_dataset(tmp_path, [])
    description = (directory / "_dataset.json").read_text()
    (directory / "_dataset.json").write_text(description.replace('"fake"', '"other"'))
    with pytest.raises(NothingToVerify, match="are of model 'fake', the dataset of 'other'"):
        await asyncio.to_thread(verify, tmp_path, kafka=kafka)
