"""What a consumer group committed is never taken for nothing: brokers that cannot tell say so, aiokafka does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from aiokafka.errors import KafkaError

from services.kernel.groups import group_offsets, partitions_of
from services.kernel.kafka import Kafka, may_pass
from services.kernel.kafka_settings import KafkaSettings
from tests.support.cluster import Cluster
from tests.support.stream import create_topics


async def test_who_is_not_the_coordinator_has_no_offsets_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path / "kafka") as cluster:
        kafka = Kafka(KafkaSettings(bootstrap=cluster.bootstrap, prefix=f"t{time.time_ns()}"))
        await create_topics(kafka)
        group = kafka.topics.generator_group
        async with kafka.started(kafka.admin) as admin:
            partitions = await partitions_of(admin, kafka.topics.prompts)
            never = await kafka.patiently(lambda: group_offsets(admin, group, partitions))
            assert never == {}
            async with kafka.started(lambda: kafka.consumer(group, "read_committed")) as consumer:
                consumer.assign(partitions)
                await consumer.commit(dict.fromkeys(partitions, 7))
            assert await group_offsets(admin, group, partitions) == {tp.partition: (7, "") for tp in partitions}
            coordinator = await admin.find_coordinator(group)
            (other, *_) = {1, 2, 3} - {coordinator}

            async def outdated(_: str) -> int:
                return other

            monkeypatch.setattr(admin, "find_coordinator", outdated)
            with pytest.raises(KafkaError) as refused:
                await group_offsets(admin, group, partitions)
            assert may_pass(refused.value)
