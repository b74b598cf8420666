"""What brokers know of topics' partitions and of consumer groups, asked through an admin client."""

from __future__ import annotations

from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CoordinatorNotAvailableError, for_code

from services.kernel.errors import Fatal

_NO_SUCH_GROUP = 69


async def partitions_of(admin: AIOKafkaAdminClient, topic: str) -> list[TopicPartition]:
    """All partitions of `topic`, in order. Raises Fatal when it is not there."""
    (described,) = await admin.describe_topics([topic])
    if described["error_code"]:
        raise Fatal(f"topic {topic} is not there: create the topics with `tokenhaul topics create`")
    return [TopicPartition(topic, number) for number in sorted(p["partition"] for p in described["partitions"])]


async def group_offsets(
    admin: AIOKafkaAdminClient, group: str, partitions: Iterable[TopicPartition]
) -> dict[int, tuple[int, str]]:
    """What `group` committed: {partition: (offset, metadata)}; a partition it never committed is left out. Raises
    KafkaError."""
    asked = list(partitions)
    answer = await admin.list_consumer_group_offsets(group, partitions=asked)
    if len(answer) < len(asked):
        # A broker that is not, or not yet, the group's coordinator says so once for all partitions and names none.
        # aiokafka does not look at that, and it would pass for a group that never committed anything.
        await has_members(admin, group)  # says what is wrong, if it still is
        raise CoordinatorNotAvailableError(f"offsets of {group}")
    return {tp.partition: (value.offset, value.metadata) for tp, value in answer.items() if value.offset >= 0}


async def has_members(admin: AIOKafkaAdminClient, group: str) -> bool:
    """Whether anybody is in `group`. Raises KafkaError."""
    (answer,) = await admin.describe_consumer_groups([group])
    ((code, _, state, *_),) = answer.groups
    if code and code != _NO_SUCH_GROUP:
        raise for_code(code)(group)
    return state not in ("Empty", "Dead")


async def caught_up(admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, group: str, topic: str) -> bool:
    """Whether `group` has committed all there is of `topic`: up to the last stable offset, given by `consumer`, which
    must be read_committed."""
    partitions = await partitions_of(admin, topic)
    committed = await group_offsets(admin, group, partitions)
    ends = await consumer.end_offsets(partitions)
    return all(committed.get(tp.partition, (-1, ""))[0] >= end for tp, end in ends.items())
