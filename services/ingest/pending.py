"""Requests that were asked again already: a row of theirs is not asked anew while a higher revision is on the topic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from schemas import ids
from schemas.prompts import Prompt
from services.kernel.codec import Decoder
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context
from services.kernel.seen import SeenIds, pack

_BATCH = 512


class _Asked(msgspec.Struct, tag="prompt.v1", frozen=True, kw_only=True):
    """Of a prompt, what its request id is made of. Token ids stay packed: most prompts were never asked again."""

    prompt_ids: msgspec.Raw
    model: str
    sample_index: int = 0
    revision: int = 0


class Pending:
    """Request ids on the prompts topic by revision, those of revision 0 left out: about 20 bytes each."""

    def __init__(self) -> None:
        self._requests: dict[int, SeenIds] = {}

    def add(self, values: Sequence[bytes]) -> None:
        """Take note of prompts of the topic."""
        decoder = Decoder(_Asked)
        found: dict[int, list[bytes]] = {}
        for value in values:
            try:
                prompt = decoder.decode(value)
                if prompt.revision:
                    prompt_ids = msgspec.msgpack.decode(prompt.prompt_ids, type=list[int])
                    id = ids.request_id(prompt_ids, prompt.model, prompt.sample_index)
                    found.setdefault(prompt.revision, []).append(id)
            except (Reject, msgspec.DecodeError):
                continue  # nobody can read it: it ends as a failure, and no row comes of it
        for revision, requests in found.items():
            self._requests.setdefault(revision, SeenIds()).add(pack(requests))

    def holds(self, prompt: Prompt, revision: int) -> bool:
        """Whether the prompt's request was asked in a higher revision than the prompt's own, one other than `revision`
        (what a command published itself before it was interrupted does not keep it from its end)."""
        higher = [seen for other, seen in self._requests.items() if other > prompt.revision and other != revision]
        if not higher:
            return False
        request = ids.request_id(prompt.prompt_ids, prompt.model, prompt.sample_index)
        return any(request in seen for seen in higher)


async def read(context: Context, kafka: Kafka) -> Pending:
    """What the prompts topic holds now. Of no use when `context` is stopping: then it was not read to its end."""
    pending = Pending()
    values: list[bytes] = []
    async for record in kafka.read_all(kafka.topics.prompts):
        context.health.beat()
        if context.stopping.is_set():
            return pending
        values.append(record.value)
        if len(values) >= _BATCH:
            await asyncio.to_thread(pending.add, values)
            values = []
    await asyncio.to_thread(pending.add, values)
    return pending
