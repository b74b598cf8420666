"""Outcomes that Kafka's own retention deletes while no sink is there to write them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kernel.errors import Fatal
from services.kernel.groups import partitions_of
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.sink.verify import verify
from tests.chaos.test_store import make_sink, rows_in
from tests.support.cluster import Cluster
from tests.support.outcomes import make_sequence
from tests.support.stream import configure, create_topics, eventually, publish_outcomes, running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture
def tidy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Kafka that looks for old records all the time."""
    extra = {"log.retention.check.interval.ms": "200", "log.initial.task.delay.ms": "200"}
    with Cluster(tmp_path_factory.mktemp("tidy"), nodes=1, extra=extra) as cluster:
        yield Kafka(KafkaSettings(bootstrap=cluster.bootstrap, prefix=f"t{time.time_ns()}"))


async def test_what_retention_deletes_while_the_sink_is_away_is_never_missed_in_silence(
    tidy: Kafka, tmp_path: Path
) -> None:
    await create_topics(tidy)
    await publish_outcomes(tidy, [make_sequence(number) for number in range(60)])
    async with running(make_sink(tidy, tmp_path)):
        await eventually(lambda: rows_in(tmp_path) == 60, 60)

    await publish_outcomes(tidy, [make_sequence(number) for number in range(60, 90)])
    await configure(tidy, tidy.topics.sequences, retention_ms="1", segment_ms="1")
    await eventually(lambda: emptied(tidy), 60)
    await configure(tidy, tidy.topics.sequences)
    await publish_outcomes(tidy, [make_sequence(number) for number in range(90, 150)])

    careful = make_sink(tidy, tmp_path)
    async with running(careful) as (_, task):
        with pytest.raises(
            Fatal,
            match=r"\d+ records of \S+\.sequences/\d were deleted before they were committed: \[\d+, \d+\)\. "
            "TOKENHAUL_SINK_ON_GAP=continue",
        ):
            await asyncio.wait_for(task, 60)
    assert rows_in(tmp_path) == 60

    carefree = make_sink(tidy, tmp_path, on_gap="continue")
    async with running(carefree):
        await eventually(lambda: rows_in(tmp_path) == 120, 60)
    assert carefree.metrics.registry.get_sample_value("tokenhaul_sink_offset_gap_records_total") == 30
    report = verify(tmp_path)
    assert (report.problems, report.rows, report.gap) == ([], 120, 30)
    assert "30 records were deleted from the topic before they could be committed" in report.text()


async def emptied(kafka: Kafka) -> bool:
    """Whether not one outcome is left."""
    async with (
        kafka.started(kafka.admin) as admin,
        kafka.started(lambda: kafka.consumer(None, "read_uncommitted")) as reader,
    ):
        partitions = await partitions_of(admin, kafka.topics.sequences)
        return bool(await reader.beginning_offsets(partitions) == await reader.end_offsets(partitions))
