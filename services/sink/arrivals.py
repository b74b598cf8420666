"""What arrives on the sequences topic, read and checked, before anybody asks whether it is new."""

from __future__ import annotations

import time
from collections.abc import Sequence as List

import msgspec
from aiokafka import ConsumerRecord

from schemas import ids
from schemas.control import Dataset
from schemas.dead import DeadLetter
from schemas.sequences import Failure, FailureReason, Outcome, Sequence
from services.kernel.codec import Decoder, Encoder
from services.kernel.errors import Fatal, Reject
from services.kernel.kafka import MAX_VALUE_BYTES
from services.sink.rows import Row, row

_KNOWN = {str(kind.__struct_config__.tag).encode() for kind in (Sequence, Failure)}
_SHOWN_BYTES = 512
_OVERHEAD_BYTES = 512


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a failure: reason and source for the footer, the dead letter (encoded) for its topic."""

    reason: FailureReason
    letter: bytes
    source: str | None


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One record: where it stands, whose it is, the row or the failure it brings, and about the memory that takes."""

    offset: int
    id: bytes
    content: Row | Refusal
    nbytes: int


class Reader:
    """Reads records of one dataset. Not for use by two threads at once."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._decoder: Decoder[Outcome] = Decoder(Outcome)  # type: ignore[arg-type]
        self._encoder = Encoder()

    def read(self, records: List[ConsumerRecord]) -> dict[int, list[Arrival]]:
        """{partition: its arrivals in order of offset}. Raises Fatal for what belongs to another dataset."""
        arrivals: dict[int, list[Arrival]] = {}
        for record in records:
            arrivals.setdefault(record.partition, []).append(self._arrival(record))
        return arrivals

    def _arrival(self, record: ConsumerRecord) -> Arrival:
        headers = dict(record.headers)
        if headers.get("schema", b"") not in _KNOWN | {b""}:
            # To call it undecodable would throw finished work away: a newer generator is running.
            raise Fatal(f"{_place(record)} has schema {headers['schema']!r}, which this version does not know")
        try:
            outcome = self._decoder.decode(record.value)
            if len(outcome.record_id) != ids.ID_BYTES:
                raise Reject("undecodable", f"its id has {len(outcome.record_id)} bytes")
            if isinstance(outcome, Failure):
                self._check(record, outcome.id, outcome.prompt.model if outcome.prompt else self._dataset.model)
                source = outcome.prompt.source if outcome.prompt else None
                return _refused(record, outcome.id, outcome.reason, self._letter(outcome), source)
            self._check(record, outcome.record_id, outcome.prompt.model)
            kept = row(outcome, record.offset)
            return Arrival(record.offset, outcome.record_id, kept, kept.nbytes)
        except Reject as reject:
            return self._undecodable(record, headers.get("id", b""), reject.detail)
        except (ValueError, OverflowError, TypeError) as error:
            return self._undecodable(record, headers.get("id", b""), f"no row can hold it: {error}")

    def _check(self, record: ConsumerRecord, id: bytes, model: str) -> None:
        """Copies of a record are told from each other only while all of them come to one partition."""
        place = ids.partition(id, self._dataset.partitions)
        if record.partition != place:
            raise Fatal(
                f"{_place(record)} holds record {id.hex()}, which belongs to partition {place} of "
                f"{self._dataset.partitions}: was the number of partitions changed?"
            )
        if model != self._dataset.model:
            raise Fatal(f"{_place(record)} is of model {model!r}, dataset {self._dataset.name!r} is of another: "
                        f"{self._dataset.model!r}")  # fmt: skip

    def _undecodable(self, record: ConsumerRecord, id: bytes, detail: str) -> Arrival:
        """A failure. Its id is the one in the header if that can be right, else one made of its place."""
        if len(id) != ids.ID_BYTES or ids.partition(id, self._dataset.partitions) != record.partition:
            id = ids.origin_id(record.topic, record.partition, record.offset)
        letter = DeadLetter(
            stage="sink",
            reason=FailureReason.UNDECODABLE,
            detail=f"{_place(record)}: {detail}",
            id=id,
            record=(record.value or b"")[:_SHOWN_BYTES].hex(),
            created_at=time.time(),
        )
        return _refused(record, id, FailureReason.UNDECODABLE, self._encoder.encode(letter), None)

    def _letter(self, failure: Failure) -> bytes:
        prompt = failure.prompt
        letter = DeadLetter(
            stage="generator",
            reason=failure.reason,
            detail=failure.detail,
            source=prompt.source if prompt else None,
            source_ref=prompt.source_ref if prompt else None,
            id=failure.id,
            prompt=prompt,
            created_at=failure.failed_at,
        )
        encoded = self._encoder.encode(letter)
        if len(encoded) > MAX_VALUE_BYTES:  # the outcome just fitted, with a little less around the prompt
            encoded = self._encoder.encode(msgspec.structs.replace(letter, prompt=None))
        return encoded


def _refused(record: ConsumerRecord, id: bytes, reason: FailureReason, letter: bytes, source: str | None) -> Arrival:
    return Arrival(record.offset, id, Refusal(reason, letter, source), len(letter) + _OVERHEAD_BYTES)


def _place(record: ConsumerRecord) -> str:
    return f"{record.topic}/{record.partition} offset {record.offset}"
