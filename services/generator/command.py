"""`tokenhaul cancel --source NAME` and `tokenhaul resume`: words to all generators, through the control topic."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time

from schemas.control import HALT_KEY, Cancel, Halt, cancel_key
from services.kernel import control, logs, topics
from services.kernel.codec import Encoder, schema_of
from services.kernel.errors import TokenhaulError
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import load


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments; where Kafka is comes from TOKENHAUL_KAFKA_*."""
    if parser.prog.endswith("cancel"):
        parser.add_argument("--source", required=True, help="its prompts of before now that are not generated yet fail")


def command(arguments: argparse.Namespace) -> int:
    """Write the word; the exit status."""
    logs.configure("auto", "info")
    try:
        kafka = Kafka(load(KafkaSettings, os.environ))
        print(asyncio.run(_cancel(kafka, arguments.source) if arguments.command == "cancel" else resume(kafka)))
    except TokenhaulError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    return 0


async def _cancel(kafka: Kafka, source: str) -> str:
    await topics.check(kafka)
    known = {(record.key or b"").partition(b"\0")[0].decode() async for record in kafka.read_all(kafka.topics.cursors)}
    if source not in known:
        names = ", ".join(sorted(known)) or "none"
        print(f"tokenhaul: ingest has read nothing of a source {source!r}; there are: {names}", file=sys.stderr)
    await _write(kafka, cancel_key(source), Cancel(source=source, created_at=time.time()))
    return f"prompts of {source} that are not generated yet will fail as cancelled"


async def resume(kafka: Kafka) -> str:
    """Lift a halt; what there is to say about it."""
    await topics.check(kafka)
    halt = (await control.read(kafka)).halt
    if not halt.halted:
        return "the generators are not halted"
    await _write(kafka, HALT_KEY, Halt(halted=False, epoch=halt.epoch + 1, created_at=time.time()))
    return f"the generators go on, budgets begin anew (halted was: {halt.reason})"


async def _write(kafka: Kafka, key: bytes, message: Cancel | Halt) -> None:
    async with kafka.started(kafka.producer) as producer:
        await producer.send_and_wait(
            kafka.topics.control, Encoder().encode(message), key=key, headers=[("schema", schema_of(message))]
        )
