"""`tokenhaul topics create|check`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from schemas.control import Dataset
from services.kernel import logs, topics
from services.kernel.errors import Fatal, TokenhaulError
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import load

log = logging.getLogger("tokenhaul.topics")

_WAIT_SECONDS = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul topics`. Where Kafka is comes from TOKENHAUL_KAFKA_*."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|check")
    create = actions.add_parser("create", help="make what is missing and freeze the dataset")
    create.add_argument("--dataset", required=True, help="name of the dataset: the directory its shards go to")
    create.add_argument("--model", required=True, help="label of the model; part of every record id")
    create.add_argument(
        "--partitions", type=_positive, default=12, help="of prompts and sequences; never changed later"
    )
    create.add_argument("--replication", type=_positive, default=3, help="copies of every topic (default %(default)s)")
    create.add_argument("--min-isr", type=_positive, default=2, help="copies that acknowledge (default %(default)s)")
    check = actions.add_parser("check", help="compare the topics with what they must be; status 3 when they differ")
    check.add_argument("--wait", action="store_true", help="until they are there and right, however long it takes")


def command(arguments: argparse.Namespace) -> int:
    """Create or check; the exit status."""
    logs.configure("auto", "info")
    try:
        kafka = Kafka(load(KafkaSettings, os.environ))
        if arguments.action == "create":
            dataset = topics.new_dataset(arguments.dataset, arguments.model, arguments.partitions)
            asyncio.run(topics.create(kafka, dataset, arguments.replication, arguments.min_isr))
        wait = arguments.action == "check" and arguments.wait
        frozen = asyncio.run(_wait(kafka) if wait else topics.check(kafka))
    except TokenhaulError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    print(f"{kafka.settings.prefix}.*: dataset {frozen.name}, model {frozen.model}, {frozen.partitions} partitions")
    return 0


async def _wait(kafka: Kafka) -> Dataset:
    while True:
        try:
            return await topics.check(kafka)
        except Fatal as error:
            log.warning("%s; looking again in %.0f s", error, _WAIT_SECONDS, extra={"action": "wait"})
        await asyncio.sleep(_WAIT_SECONDS)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
