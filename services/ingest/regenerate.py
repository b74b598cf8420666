"""Prompts that are asked again by command (`tokenhaul regenerate`): the same ids, the next revision.

The command names records; their prompts are on the prompts topic, which is kept for ever, and are looked up there. What
is published for a command has record ids of its own that depend on the command alone, and a record id on the topic is
not published again. So a command that was interrupted is simply applied anew, and still every prompt of it comes once;
the transaction with the last of them says that it is done.

A row is not paid for twice: when another command, or the sources file, asked its request in a higher revision before,
the row is left out, whether or not that answer is there yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from schemas import ids
from schemas.control import Regenerate, Regenerated, regenerate_key
from schemas.prompts import Prompt
from services.ingest import pending
from services.ingest.ledger import Ledger
from services.ingest.pending import Pending
from services.ingest.prompts import Ready
from services.kernel.codec import Decoder, Encoder
from services.kernel.control import ControlView
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context
from services.kernel.seen import SeenIds, pack

log = logging.getLogger("tokenhaul.ingest")

_BATCH = 512
_BATCH_BYTES = 32 * 1024 * 1024


async def apply(context: Context, kafka: Kafka, ledger: Ledger, commands: ControlView) -> None:
    """Carry out every command that waits. Raises as Ledger.publish does; a stop leaves the rest for the next start."""
    for command in commands.regenerations():
        if not command.done and not context.stopping.is_set():
            await _Regeneration(context, kafka, ledger, command).run(commands)


class _Regeneration:
    """One command. Memory holds the ids it names (20 bytes each) and one batch of prompts."""

    def __init__(self, context: Context, kafka: Kafka, ledger: Ledger, command: Regenerate) -> None:
        self._context, self._kafka, self._ledger, self._command = context, kafka, ledger, command
        self._wanted = SeenIds()
        self._wanted.add(pack([command.ids]))
        self._found = SeenIds()
        self._skipped = 0

    async def run(self, commands: ControlView) -> None:
        """Look in one pass over the topic what was asked again before; in another look the prompts up, and publish
        them as they come."""
        command = self._command
        log.info("asking %d prompts again: %s", len(self._wanted), command.reason, extra={"action": "regenerate"})
        asked = await pending.read(self._context, self._kafka)
        values: list[bytes] = []
        async for record in self._kafka.read_all(self._kafka.topics.prompts):
            self._context.health.beat()
            if self._context.stopping.is_set():
                return  # also when the look before was cut short
            id = next((value for name, value in record.headers if name == "id"), b"")
            if len(id) != ids.ID_BYTES or id not in self._wanted or id in self._found:
                continue
            self._found.add(pack([id]))
            values.append(record.value)
            if len(values) >= _BATCH or sum(map(len, values)) >= _BATCH_BYTES:
                await self._publish(values, asked)
                values = []
        missing = len(self._wanted) - len(self._found)
        prompts = await self._made(values, asked)  # before the count: it leaves some out
        done = Regenerated(
            prompts=len(self._found) - self._skipped, missing=missing, skipped=self._skipped, done_at=time.time()
        )
        ended = msgspec.structs.replace(command, ids=b"", done=done)
        await self._ledger.publish_again(prompts, ended)
        commands.update(regenerate_key(command.command), ended)
        log.info("%d prompts are asked again", done.prompts, extra={"action": "regenerated"})
        if self._skipped:
            limit = command.max_new_tokens
            log.warning(
                "%d rows are not asked again: a higher revision of theirs is asked already, and its answer is not "
                "there yet or failed (`tokenhaul dead list`)%s", self._skipped,
                f"; they come with the max_new_tokens of then, not with {limit}" if limit else "",
                extra={"action": "regenerated"},
            )  # fmt: skip
        if missing:
            log.warning(
                "%d records to be asked again are on no prompts topic here", missing, extra={"action": "regenerated"}
            )

    async def _publish(self, values: Sequence[bytes], asked: Pending) -> None:
        if prompts := await self._made(values, asked):
            await self._ledger.publish_again(prompts)

    async def _made(self, values: Sequence[bytes], asked: Pending) -> list[tuple[str, Ready]]:
        made = await asyncio.to_thread(asked_again, values, self._command, asked)
        self._skipped += len(values) - len(made)
        return made


def asked_again(values: Sequence[bytes], command: Regenerate, asked: Pending) -> list[tuple[str, Ready]]:
    """Prompts of the topic as `command` asks them, each with its source, without those `asked` otherwise since. A
    prompt nobody can read ended as a failure, and is no row to be asked again."""
    decoder, encoder = Decoder(Prompt), Encoder()
    made = []
    for value in values:
        prompt = decoder.decode(value)
        if asked.holds(prompt, command.revision):
            continue
        sampling, clamped = prompt.sampling, prompt.clamped
        if command.max_new_tokens:
            room = prompt.context_length - len(prompt.prompt_ids)
            sampling = {**sampling, "max_new_tokens": min(command.max_new_tokens, room)}
            clamped = command.max_new_tokens > room
        id = ids.record_id(prompt.prompt_ids, prompt.model, sampling, prompt.sample_index, command.revision)
        prompt = msgspec.structs.replace(
            prompt, id=id, seed=ids.seed(id), sampling=sampling, clamped=clamped, revision=command.revision,
            created_at=time.time(),
        )  # fmt: skip
        made.append((prompt.source, Ready(id, encoder.encode(prompt), len(prompt.prompt_ids), prompt.source_ref.row)))
    return made
