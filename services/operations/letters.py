"""The dead topic as people use it: a set of letters by key, without those that were dropped or replayed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
from aiokafka import ConsumerRecord

from schemas.control import Control, Drop, Replay
from schemas.ids import ID_BYTES
from schemas.prompts import SourceRef
from services.kernel.codec import Decoder
from services.kernel.errors import Reject
from services.kernel.kafka import Kafka

_NO_PROMPT = msgspec.Raw(b"")


class Letter(msgspec.Struct, tag="dead.v1", frozen=True, kw_only=True):
    """What is shown of a dead letter. Of its prompt, which is most of it, only `has_prompt` is kept."""

    stage: str
    reason: str
    detail: str
    source: str | None = None
    source_ref: SourceRef | None = None
    id: bytes | None = None
    record: str | None = None
    created_at: float
    prompt: msgspec.Raw = _NO_PROMPT
    has_prompt: bool = False


class Settled(msgspec.Struct):
    """Letters nobody need look at any more: {key: those written before this time}."""

    before: dict[bytes, float]

    def add(self, keys: list[bytes], created_at: float) -> None:
        """Letters of `keys` written before `created_at` are settled."""
        for key in keys:
            self.before[key] = max(created_at, self.before.get(key, 0.0))

    def holds(self, key: bytes, letter: Letter) -> bool:
        """Whether the letter is settled."""
        return letter.created_at < self.before.get(key, 0.0)


async def settled(kafka: Kafka) -> Settled:
    """What control says of letters that were dropped or replayed."""
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    found = Settled({})
    async for record in kafka.read_all(kafka.topics.control):
        try:
            message = decoder.decode(record.value)
        except Reject:
            continue  # of a newer version
        if isinstance(message, Drop):
            found.add(message.keys, message.created_at)
        elif isinstance(message, Replay):
            starts = range(0, len(message.ids), ID_BYTES)
            found.add([message.ids[start : start + ID_BYTES] for start in starts], message.created_at)
    return found


async def read(kafka: Kafka, wanted: Callable[[Letter], bool] = lambda letter: True) -> dict[bytes, Letter]:
    """{key: its last letter} of all that are not settled and `wanted`."""
    found: dict[bytes, Letter] = {}
    done = await settled(kafka)
    async for key, letter in _letters(kafka):
        if not done.holds(key, letter) and wanted(letter):
            found[key] = letter
        else:
            found.pop(key, None)
    return found


async def _letters(kafka: Kafka) -> AsyncIterator[tuple[bytes, Letter]]:
    decoder = Decoder(Letter)
    async for record in kafka.read_all(kafka.topics.dead):
        try:
            letter = decoder.decode(record.value)
            letter = msgspec.structs.replace(letter, prompt=_NO_PROMPT, has_prompt=len(bytes(letter.prompt)) > 1)
        except Reject as reject:
            letter = _unreadable(record, reject)
        yield record.key or f"{record.partition}:{record.offset}".encode(), letter


def _unreadable(record: ConsumerRecord, reject: Reject) -> Letter:
    """A letter of a newer version, or no letter at all: it is shown, for it stands for something that failed."""
    return Letter(
        stage="unknown",
        reason="unreadable_letter",
        detail=f"{record.topic}, offset {record.offset}: {reject.detail}",
        created_at=record.timestamp / 1000,
    )
