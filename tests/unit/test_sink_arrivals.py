"""What the sink makes of a record: a row that is exactly the sequence, a failure with its letter, or a full stop."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from schemas import ids
from schemas.dead import DeadLetter
from schemas.prompts import SourceRef
from schemas.sequences import Failure, FailureReason
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal
from services.sink import arrivals
from services.sink.arrivals import Arrival, Reader, Refusal
from services.sink.rows import Row
from tests.support.outcomes import DATASET, TOPIC, make_failure, make_sequence, numbers_in, record

NUMBER, OTHER = numbers_in(0, 2)


def read(value: object, **place: object) -> Arrival:
    (arrival,) = Reader(DATASET).read([record(value, 5, **place)])[0]  # type: ignore[arg-type]
    return arrival


def refusal(arrival: Arrival) -> tuple[FailureReason, DeadLetter]:
    assert isinstance(arrival.content, Refusal)
    return arrival.content.reason, Decoder(DeadLetter).decode(arrival.content.letter)


def test_a_row_holds_what_was_asked_and_what_was_answered() -> None:
    sequence = make_sequence(
        NUMBER,
        output_ids=[30, 31, 2],
        prompt={"metadata": {"k": 1}, "source_ref": SourceRef("f.jsonl", 3), "messages": "[]", "seed": 9},
        reasoning_end=5,
        logprobs=[-0.5, -0.25, 0.0],
        weight_version="w",
    )
    row = read(sequence).content
    assert isinstance(row, Row)
    assert row.input_ids.tolist() == [*sequence.prompt.prompt_ids, 30, 31, 2]
    assert (row.prompt_length, row.output_length, row.reasoning_end) == (len(sequence.prompt.prompt_ids), 3, 5)
    assert row.id == sequence.prompt.id.hex()
    assert row.prompt_id == ids.prompt_id(sequence.prompt.prompt_ids).hex()
    assert row.request_id == ids.request_id(sequence.prompt.prompt_ids, DATASET.model, 0).hex()
    assert json.loads(row.sampling) == {**sequence.prompt.sampling, "sampling_seed": 9}
    assert json.loads(row.source_ref) == {"file": "f.jsonl", "row": 3}
    assert json.loads(row.metadata) == {"k": 1}
    assert row.logprobs is not None
    assert row.logprobs.tolist() == [-0.5, -0.25, 0.0]
    assert (row.matched_stop, row.weight_version, row.messages, row.tools) == ("2", "w", "[]", None)
    assert (row.created_at, row.generated_at, row.kafka_offset) == (1_700_000_000_250_000, 1_700_000_001_500_000, 5)


def test_a_stop_string_is_told_from_a_stop_id() -> None:
    row = read(make_sequence(NUMBER, matched_stop="2")).content
    assert isinstance(row, Row)
    assert row.matched_stop == '"2"'


def test_a_failure_becomes_a_letter_with_the_prompt() -> None:
    failure = make_failure(NUMBER)
    reason, letter = refusal(read(failure))
    assert reason is FailureReason.ENGINE_REJECTED
    assert (letter.stage, letter.reason, letter.detail, letter.id) == ("generator", reason, "no", failure.id)
    assert letter.prompt == failure.prompt
    assert letter.source == "test"


def test_a_letter_too_large_for_kafka_goes_without_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_VALUE_BYTES", 200)
    _, letter = refusal(read(make_failure(NUMBER)))
    assert letter.prompt is None
    assert letter.detail == "no"


GARBAGE = [b"", b"garbage", b"\x28\xb5\x2f\xfd garbage"]


@pytest.mark.parametrize("value", GARBAGE)
def test_what_cannot_be_read_is_a_failure_under_the_id_of_its_header(value: bytes) -> None:
    id = make_sequence(NUMBER).prompt.id
    arrival = read(value, headers=[("id", id)])
    reason, letter = refusal(arrival)
    assert arrival.id == letter.id == id
    assert (reason, letter.stage, letter.record) == (FailureReason.UNDECODABLE, "sink", value.hex())
    assert f"{TOPIC}/0 offset 5" in letter.detail


@pytest.mark.parametrize("header", [None, b"short", make_sequence(numbers_in(1, 1)[0]).prompt.id])
def test_without_an_id_that_can_be_right_its_place_is_its_id(header: bytes | None) -> None:
    arrival = read(b"garbage", headers=[("id", header)] if header else [])
    assert arrival.id == ids.origin_id(TOPIC, 0, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": [2**31]},
        {"output_ids": [-(2**31) - 1]},
        {"attempts": 2**40},
        {"segments": [2**33]},
        {"generated_at": float("nan")},
        {"generated_at": 1e300},
        {"prompt": {"metadata": {"k": msgspec.msgpack.Ext(1, b"")}}},
    ],
)
def test_what_no_column_can_hold_is_refused_and_stands_in_nobodys_way(changes: dict[str, Any]) -> None:
    arrival = read(make_sequence(NUMBER, **changes))
    assert refusal(arrival)[0] is FailureReason.UNDECODABLE
    assert arrival.id == make_sequence(NUMBER).prompt.id


def test_an_id_of_a_wrong_length_is_refused() -> None:
    broken = Failure(id=b"short", reason=FailureReason.NAN, detail="", failed_at=0.0)
    assert refusal(read(broken))[0] is FailureReason.UNDECODABLE


@pytest.mark.parametrize("outcome", [make_sequence(numbers_in(1, 1)[0]), make_failure(numbers_in(1, 1)[0])])
def test_a_record_in_a_wrong_partition_ends_the_service(outcome: object) -> None:
    with pytest.raises(Fatal, match=r"offset 5 holds record \w+, which belongs to partition 1 of 3"):
        read(outcome)


@pytest.mark.parametrize("kind", ["sequence", "failure"])
def test_a_record_of_another_model_ends_the_service(kind: str) -> None:
    sequence = make_sequence(NUMBER, prompt={"model": "another"})
    failure = msgspec.structs.replace(make_failure(NUMBER), prompt=sequence.prompt)
    with pytest.raises(Fatal, match="model 'another'"):
        read(sequence if kind == "sequence" else failure)


def test_a_newer_schema_ends_the_service_before_it_is_called_garbage() -> None:
    with pytest.raises(Fatal, match=r"sequence\.v2"):
        read(b"\x00", headers=[("schema", b"sequence.v2")])
