"""The topics of a dataset: how they must be, how they are made, whether they are so.

`create` also freezes the dataset (name, model label, number of partitions) in the control topic: all copies of a
record meet in one partition only while these stay as they are.
"""

from __future__ import annotations

import time

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code

from schemas.control import DATASET_KEY, Control, Dataset
from services.kernel.codec import Decoder, Encoder
from services.kernel.errors import Fatal, SettingsError
from services.kernel.kafka import MAX_MESSAGE_BYTES, Kafka

_SEVEN_DAYS_MS = 7 * 24 * 3600 * 1000
_TOPIC_ALREADY_EXISTS = 36
_INVALID_REPLICATION = 38


def required(kafka: Kafka, partitions: int) -> dict[str, tuple[int, dict[str, str]]]:
    """{topic: (number of partitions, configuration)}."""
    common = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(MAX_MESSAGE_BYTES)}
    kept = {**common, "cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
    compacted = {**common, "cleanup.policy": "compact"}
    names = kafka.topics
    return {
        names.prompts: (partitions, kept),
        names.sequences: (partitions, {**kept, "retention.ms": str(_SEVEN_DAYS_MS)}),
        names.dead: (1, kept),
        names.cursors: (1, compacted),
        names.control: (1, compacted),
    }


async def create(kafka: Kafka, dataset: Dataset, replication: int, min_isr: int) -> None:
    """Make what is missing and freeze `dataset`. Raises Fatal when another dataset is frozen here already."""
    async with kafka.started(kafka.admin) as admin:
        for name, (partitions, config) in required(kafka, dataset.partitions).items():
            config = {**config, "min.insync.replicas": str(min_isr)}
            answer = await admin.create_topics([NewTopic(name, partitions, replication, topic_configs=config)])
            _, code, message = answer.topic_errors[0]
            if code not in (0, _TOPIC_ALREADY_EXISTS):
                hint = " (--replication 1 --min-isr 1 for a single broker)" if code == _INVALID_REPLICATION else ""
                raise Fatal(f"topic {name} cannot be created: {message or for_code(code).__name__}{hint}")
    try:
        frozen = await frozen_dataset(kafka)
    except Fatal:
        async with kafka.started(kafka.producer) as producer:
            value = Encoder().encode(dataset)
            await producer.send_and_wait(kafka.topics.control, value, key=DATASET_KEY)
        return
    if (frozen.name, frozen.model, frozen.partitions) != (dataset.name, dataset.model, dataset.partitions):
        raise Fatal(
            f"topics {kafka.settings.prefix}.* belong to dataset {frozen.name!r} of model {frozen.model!r} with "
            f"{frozen.partitions} partitions, not to {dataset.name!r} of {dataset.model!r} with "
            f"{dataset.partitions}: take another TOKENHAUL_KAFKA_PREFIX for another dataset"
        )


async def frozen_dataset(kafka: Kafka) -> Dataset:
    """The dataset these topics belong to. Raises Fatal when none is frozen."""
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    found: Dataset | None = None
    async for record in kafka.read_all(kafka.topics.control):
        if record.key == DATASET_KEY:
            message = decoder.decode(record.value)
            found = message if isinstance(message, Dataset) else found
    if found is None:
        raise Fatal(f"no dataset is frozen in {kafka.topics.control}: run `tokenhaul topics create` first")
    return found


async def check(kafka: Kafka) -> Dataset:
    """Compare the topics with what they must be. Raises Fatal with a line for each difference."""
    return await kafka.patiently(lambda: _check(kafka))


async def _check(kafka: Kafka) -> Dataset:
    async with kafka.started(kafka.admin) as admin:
        present = {
            topic["topic"]: len(topic["partitions"])
            for topic in await admin.describe_topics(list(required(kafka, 1)))
            if not topic["error_code"]
        }
        missing = [name for name in required(kafka, 1) if name not in present]
        if missing:
            raise Fatal(f"no topic {', '.join(missing)} at {kafka.address}: run `tokenhaul topics create` first")
        configs = await _configs(admin, list(present))
    dataset = await frozen_dataset(kafka)
    problems = []
    for name, (partitions, config) in required(kafka, dataset.partitions).items():
        if present[name] != partitions:
            problems.append(f"topic {name} has {present[name]} partitions, it must have {partitions}")
        problems += [
            f"topic {name} has {key}={configs[name].get(key)}, it must have {value}"
            for key, value in config.items()
            if configs[name].get(key) != value and not _larger(key, configs[name].get(key), value)
        ]
    if problems:
        raise Fatal("\n".join(problems))
    return dataset


def _larger(key: str, actual: str | None, wanted: str) -> bool:
    """Keeping more, or taking larger messages, than asked for is no harm."""
    if key not in ("retention.ms", "max.message.bytes") or actual is None or wanted == "-1":
        return False
    return actual == "-1" or int(actual) > int(wanted)


async def _configs(admin: AIOKafkaAdminClient, topics: list[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
    return {
        resource[3]: {entry[0]: entry[1] for entry in resource[4]}
        for answer in await admin.describe_configs(resources)
        for resource in answer.resources
    }


def new_dataset(name: str, model: str, partitions: int) -> Dataset:
    """A dataset frozen now. Raises SettingsError for a name or label that cannot be one: it would be for ever."""
    if not is_directory_name(name):
        raise SettingsError(f"dataset {name!r} cannot be a directory: its name is empty, has a / or begins with . or _")
    if not model.strip():
        raise SettingsError("the model has no label: rows and record ids are made with it")
    return Dataset(name=name, model=model, partitions=partitions, created_at=time.time())


def is_directory_name(name: str) -> bool:
    """Whether a dataset can be called that: it is the directory its shards go to."""
    return bool(name.strip()) and "/" not in name and not name.startswith((".", "_"))
