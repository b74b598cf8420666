"""Failed prompts that are asked again by command (`tokenhaul dead replay`), under their own record ids.

A failure is not the last word on a record: the sink writes a row that comes later, and lists the failure as superseded.
The prompts are taken from the dead letters, which hold them whole. A record id that is on the topic already tells
nothing here, so a command and its prompts are one transaction: it is done with all of them, or it is still to be done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from schemas import ids
from schemas.control import Regenerated, Replay, replay_key
from schemas.dead import DeadLetter
from services.ingest.ledger import Ledger
from services.ingest.prompts import Ready
from services.kernel.codec import Decoder, Encoder
from services.kernel.control import ControlView
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context

log = logging.getLogger("tokenhaul.ingest")

_COMMANDS_AT_ONCE = 8
"""Looked up in one pass over the dead topic; memory holds their prompts."""


async def apply(context: Context, kafka: Kafka, ledger: Ledger, commands: ControlView) -> None:
    """Carry out every replay that waits. Raises as Ledger.publish does; a stop leaves the rest for the next start."""
    waiting = commands.replays()
    while waiting and not context.stopping.is_set():
        group, waiting = waiting[:_COMMANDS_AT_ONCE], waiting[_COMMANDS_AT_ONCE:]
        prompts = await _look_up(context, kafka, group)
        for command in group:
            wanted = _ids(command)
            found = [prompts[id] for id in wanted if id in prompts]
            done = Regenerated(prompts=len(found), missing=len(wanted) - len(found), done_at=time.time())
            ended = msgspec.structs.replace(command, done=done)
            await ledger.replay(found, ended)
            commands.update(replay_key(command.command), ended)
            log.info(
                "%d failed prompts are asked again, %d have no letter with their prompt", done.prompts, done.missing,
                extra={"action": "replayed"},
            )  # fmt: skip


def _ids(command: Replay) -> list[bytes]:
    packed = command.ids
    return list(dict.fromkeys(packed[start : start + ids.ID_BYTES] for start in range(0, len(packed), ids.ID_BYTES)))


async def _look_up(context: Context, kafka: Kafka, commands: Sequence[Replay]) -> dict[bytes, Ready]:
    """The prompts of `commands` that the dead topic has, made now: a cancellation of before does not concern them."""
    wanted = {id for command in commands for id in _ids(command)}
    decoder, encoder = Decoder(DeadLetter), Encoder()
    found: dict[bytes, Ready] = {}

    def read(id: bytes, value: bytes) -> None:
        try:
            prompt = decoder.decode(value).prompt
        except Reject:
            return  # of a newer version; the command will say that it is missing
        if prompt is not None and prompt.id == id:
            prompt = msgspec.structs.replace(prompt, created_at=time.time())
            found[id] = Ready(id, encoder.encode(prompt), len(prompt.prompt_ids), prompt.source_ref.row)

    async for record in kafka.read_all(kafka.topics.dead):
        context.health.beat()
        if record.key in wanted:
            await asyncio.to_thread(read, record.key, record.value)
    return found
