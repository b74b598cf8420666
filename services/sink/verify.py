"""`tokenhaul verify ROOT`: proves from the files alone that a dataset is whole and right, and says what is not. With
--audit it also reads the topics, and accounts for every prompt."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import deque
from pathlib import Path

import msgspec
from aiokafka.errors import KafkaError

from schemas.control import Dataset
from services.kernel.errors import Fatal, Retry, SettingsError, TokenhaulError
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.objects import open_store
from services.kernel.settings import load
from services.kernel.store import Store
from services.sink.accounts import Auditor
from services.sink.audit import Audit
from services.sink.chain import find
from services.sink.drift import Drift
from services.sink.report import Report
from services.sink.rerender import Rerender, load_tokenizer


class NothingToVerify(TokenhaulError):
    """The directory is no dataset, the tokenizer none, or the store does not answer."""

    status = 2


def verify(
    root: Path | str,
    tokenizer_dir: Path | None = None,
    *,
    trust_remote_code: bool = False,
    deep: bool = False,
    kafka: Kafka | None = None,
) -> Report:
    """Look at every file, footer and row of the dataset in `root` (a directory or a URL), or right under it. With
    `deep`, which needs a tokenizer, measure what text would have lost; with `kafka`, account for every prompt. Raises
    NothingToVerify.

    Partitions one after the other, shards in order, row groups one at a time: memory holds one shard and the ids of one
    partition (16 bytes each)."""
    store, folder, dataset = _find(str(root))
    rerender = None
    if tokenizer_dir is not None:
        if not tokenizer_dir.is_dir():
            raise NothingToVerify(f"--tokenizer {tokenizer_dir} is no directory")
        try:
            rerender = Rerender(load_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code))
        except (OSError, ValueError) as error:
            raise NothingToVerify(f"no tokenizer can be loaded from {tokenizer_dir}: {error}") from error
    audit = Audit(store, folder, dataset, rerender, Drift() if deep else None)
    try:
        if kafka is None:
            deque(audit.partitions(), maxlen=0)
        else:
            asyncio.run(_account(audit, dataset, kafka))
    # A file that cannot be read is a problem; a store that cannot be listed, and topics that cannot be, are the end.
    except (Retry, KafkaError) as error:
        raise NothingToVerify(f"not verified to the end: {error}") from error
    return audit.report


async def _account(audit: Audit, dataset: Dataset, kafka: Kafka) -> None:
    """The walk blocks the event loop: nothing else runs on it, and these consumers are members of no group."""
    async with (
        kafka.started(lambda: kafka.consumer(None, "read_committed")) as prompts,
        kafka.started(lambda: kafka.consumer(None, "read_uncommitted")) as sequences,
    ):
        try:
            auditor = await Auditor.begin(kafka, dataset, prompts, sequences)
        except (Fatal, ValueError) as error:
            raise NothingToVerify(str(error)) from error
        for partition in audit.partitions():
            if partition.tail is None:
                audit.report.problem("", None, f"prompts of partition {partition.number}: its chain cannot be read")
            else:
                await auditor.partition(partition.number, partition.tail, partition.rows, partition.failures)
        audit.report.account(auditor.accounts)


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul verify`."""
    parser.add_argument("root", metavar="ROOT", help="a dataset, or where it stands: a directory or s3://bucket/prefix")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="render the stored messages with it and compare the prompt ids"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that comes with the tokenizer"
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="decode and tokenise the outputs again: how many would have changed as text (needs --tokenizer)",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="account for every prompt on the topic (TOKENHAUL_KAFKA_BOOTSTRAP, TOKENHAUL_KAFKA_PREFIX)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def command(arguments: argparse.Namespace) -> int:
    """Verify and print; 0 nothing is wrong, 1 something is, 2 there is nothing to verify."""
    try:
        if arguments.deep and not arguments.tokenizer:
            raise NothingToVerify("--deep needs the model's tokenizer: --tokenizer DIR")
        report = verify(
            arguments.root,
            arguments.tokenizer,
            trust_remote_code=arguments.trust_remote_code,
            deep=arguments.deep,
            kafka=Kafka(load(KafkaSettings, os.environ)) if arguments.audit else None,
        )
    except (NothingToVerify, SettingsError) as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if arguments.json else report.text())
    return 0 if report.ok else 1


def _find(root: str) -> tuple[Store, str, Dataset]:
    try:
        store = open_store(root)
        return store, *find(store)
    except TokenhaulError as error:
        raise NothingToVerify(str(error)) from error
