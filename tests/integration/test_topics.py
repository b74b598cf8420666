"""`tokenhaul topics create|check` on a real Kafka."""

from __future__ import annotations

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, RequestTimedOutError

from services.kernel import topics
from services.kernel.errors import Fatal
from services.kernel.kafka import Kafka
from tests.support.processes import tokenhaul
from tests.support.stream import eventually


async def test_created_topics_are_as_they_must_be_and_stay_frozen(kafka: Kafka) -> None:
    dataset = topics.new_dataset("d", "m", 3)
    await topics.create(kafka, dataset, replication=1, min_isr=1)
    await topics.create(kafka, dataset, replication=1, min_isr=1)  # again changes nothing
    assert (await topics.check(kafka)) == dataset
    for other in (("e", "m", 3), ("d", "n", 3), ("d", "m", 4)):
        with pytest.raises(Fatal, match="belong to dataset 'd' of model 'm' with 3 partitions"):
            await topics.create(kafka, topics.new_dataset(*other), replication=1, min_isr=1)


async def test_what_was_changed_is_named(kafka: Kafka) -> None:
    await topics.create(kafka, topics.new_dataset("d", "m", 2), replication=1, min_isr=1)
    names = kafka.topics
    async with kafka.started(kafka.admin) as admin:
        await admin.create_partitions({names.sequences: NewPartitions(3)})
        await admin.alter_configs(
            [
                ConfigResource(
                    ConfigResourceType.TOPIC, names.prompts, {"retention.ms": "1000", "cleanup.policy": "delete"}
                )
            ]
        )
    expected = {
        f"topic {names.sequences} has 3 partitions, it must have 2",
        f"topic {names.prompts} has retention.ms=1000, it must have -1",
        f"topic {names.prompts} has message.timestamp.type=CreateTime, it must have LogAppendTime",
    }

    async def all_are_named() -> bool:
        """A broker tells what the controller changed a moment later."""
        try:
            await topics.check(kafka)
        except Fatal as refused:
            return expected <= set(str(refused).splitlines())
        return False

    await eventually(all_are_named)


async def test_a_check_outlives_a_broker_that_goes_away_in_between(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a busy broker does to an admin client right after it has connected."""
    dataset = topics.new_dataset("d", "m", 2)
    await topics.create(kafka, dataset, replication=1, min_isr=1)
    describe, refused = AIOKafkaAdminClient.describe_configs, iter([KafkaConnectionError(), RequestTimedOutError()])

    async def busy(admin: AIOKafkaAdminClient, resources: object) -> object:
        for error in refused:
            raise error
        return await describe(admin, resources)

    monkeypatch.setattr(AIOKafkaAdminClient, "describe_configs", busy)
    assert await topics.check(kafka) == dataset
    assert caplog.text.count("gives no answer") == 2


def test_the_command_tells_what_is_there(kafka: Kafka) -> None:
    environ = {"TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address, "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix}
    missing = tokenhaul("topics", "check", **environ)
    assert "run `tokenhaul topics create` first" in missing.communicate(timeout=90)[0]
    assert missing.returncode == 3
    create = tokenhaul(
        "topics", "create", "--dataset", "d", "--model", "m", "--partitions", "2", "--replication", "1",
        "--min-isr", "1", **environ,
    )  # fmt: skip
    output, _ = create.communicate(timeout=90)
    assert (create.returncode, f"{kafka.settings.prefix}.*: dataset d, model m, 2 partitions" in output) == (0, True)
