"""`tokenhaul regenerate --where EXPR`: ask for rows again, with the next revision.

It writes a command to the control topic; ingest, the only one that publishes prompts, carries it out. When the new rows
are there, readers see them in place of the old ones. A row asked again is not lost meanwhile: it stays until then.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
import uuid
from collections.abc import Sequence

from rich.console import Console

from schemas.control import Control, Regenerate, regenerate_key
from services.dataset import cli, discard, place, where
from services.dataset.place import Place
from services.dataset.reader import View
from services.kernel import logs, topics
from services.kernel.codec import Decoder, Encoder, schema_of
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import load

_IDS_PER_COMMAND = 250_000
"""4 MB of a message, which may have 16; ingest goes over the prompts topic twice for each command."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul regenerate`. Where Kafka is comes from TOKENHAUL_KAFKA_*."""
    parser.add_argument("--where", required=True, metavar="EXPR", help="which rows (docs/dataset.md)")
    parser.add_argument("--discarded", action="store_true", help="among the rows that were discarded, not the others")
    parser.add_argument(
        "--max-new-tokens", type=cli.positive, metavar="N", help="longest answer this time (default: as before)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say how many rows it would be, ask for none")
    place.add_argument(parser)


@cli.reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Find the rows, show them, write the command."""
    logs.configure("auto", "warning")
    condition = where.parse(arguments.where)
    dataset = place.find(arguments.dataset)
    kafka = None if arguments.dry_run else Kafka(load(KafkaSettings, os.environ))
    view = View(dataset)
    found = discard.find(view, condition, discarded=arguments.discarded)
    console = Console(highlight=False, soft_wrap=True)
    console.print(found.table())
    if kafka is None:
        console.print("nothing is asked again (--dry-run)")
    elif not found.ids:
        console.print("no row is like that: nothing is asked again")
    else:
        revision = asyncio.run(
            _write(kafka, dataset, found.ids, view.revisions.highest, arguments.max_new_tokens, condition.text)
        )
        console.print(
            f"{len(found.ids)} rows are asked again as revision {revision}, as soon as ingest runs; it leaves out "
            "those whose request is asked in a higher revision already (its log says how many)"
        )
    return 0


async def _write(
    kafka: Kafka, dataset: Place, ids: Sequence[str], highest: int, max_new_tokens: int | None, reason: str
) -> int:
    """Write the command; the revision it asks for, which no row and no command had before."""
    frozen = await topics.check(kafka)
    place.check(dataset, frozen, kafka.settings.prefix)
    revision = max(highest, await _commanded(kafka)) + 1
    async with kafka.started(kafka.producer) as producer:
        for start in range(0, len(ids), _IDS_PER_COMMAND):
            packed = bytes.fromhex("".join(ids[start : start + _IDS_PER_COMMAND]))
            message = Regenerate(
                command=uuid.uuid4().hex, ids=packed, revision=revision, max_new_tokens=max_new_tokens,
                reason=reason, created_at=time.time(),
            )  # fmt: skip
            await producer.send_and_wait(
                kafka.topics.control,
                Encoder().encode(message),
                key=regenerate_key(message.command),
                headers=[("schema", schema_of(message))],
            )
    return revision


async def _commanded(kafka: Kafka) -> int:
    """The highest revision a command asked for, whether its rows are there yet or not."""
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    highest = 0
    async for record in kafka.read_all(kafka.topics.control):
        try:
            message = decoder.decode(record.value)
        except Reject:
            continue  # of a newer version; regenerate.v1 is what this one knows
        if isinstance(message, Regenerate):
            highest = max(highest, message.revision)
    return highest
