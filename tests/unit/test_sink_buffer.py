"""Which outcome of a record counts."""

from __future__ import annotations

import pytest

from schemas.sequences import Outcome
from services.kernel.errors import Fatal
from services.sink.arrivals import Reader
from services.sink.buffer import Buffer
from services.sink.chain import Chain
from tests.support.outcomes import DATASET, MemoryStore, fill, make_failure, make_sequence, numbers_in, record

NUMBER, OTHER = numbers_in(0, 2)
ROW, FAILURE = make_sequence(NUMBER), make_failure(NUMBER)
ID = ROW.prompt.id


def chain() -> Chain:
    return Chain(MemoryStore(), DATASET, 0, "writer")


def summary(buffer: Buffer) -> tuple[int, int, int, int]:
    return len(buffer.rows), len(buffer.failures), len(buffer.superseded), buffer.duplicates


# What came, and what is kept of it: rows, failures, superseded, duplicates.
RULES = [
    ([ROW], (1, 0, 0, 0)),
    ([ROW, ROW], (1, 0, 0, 1)),
    ([ROW, FAILURE], (1, 0, 0, 1)),
    ([FAILURE], (0, 1, 0, 0)),
    ([FAILURE, FAILURE], (0, 1, 0, 1)),
    ([FAILURE, ROW], (1, 1, 1, 0)),
    ([FAILURE, ROW, ROW], (1, 1, 1, 1)),
    ([FAILURE, ROW, FAILURE], (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("outcomes", "kept"), RULES)
def test_within_an_open_shard(outcomes: list[object], kept: tuple[int, int, int, int]) -> None:
    buffer = fill(Buffer(0, None), chain(), outcomes)  # type: ignore[arg-type]
    assert summary(buffer) == kept
    assert buffer.end == len(outcomes)
    assert buffer.last_id == ID


@pytest.mark.parametrize(("outcomes", "kept"), RULES)
def test_over_shards(outcomes: list[object], kept: tuple[int, int, int, int]) -> None:
    of_shards = chain()
    total = [0, 0, 0, 0]
    for outcome in outcomes:
        buffer = fill(Buffer(of_shards.tail, of_shards.last_id), of_shards, [outcome])  # type: ignore[list-item]
        total = [before + now for before, now in zip(total, summary(buffer), strict=True)]
        assert of_shards.commit(buffer)
    assert tuple(total) == kept


def test_a_dropped_shard_is_forgotten() -> None:
    of_shards = chain()
    fill(Buffer(0, None), of_shards, [ROW, FAILURE])
    again = fill(Buffer(0, None), of_shards, [ROW])
    assert summary(again) == (1, 0, 0, 0)


def test_the_first_row_is_the_one_that_is_kept() -> None:
    buffer = fill(Buffer(0, None), chain(), [make_sequence(NUMBER, [5, 2]), make_sequence(NUMBER, [6, 2])])
    assert buffer.rows[0].input_ids[-2] == 5


@pytest.mark.parametrize("offset", [1, 3])
def test_an_offset_that_does_not_follow_ends_the_service(offset: int) -> None:
    of_shards = chain()
    buffer = fill(Buffer(0, None), of_shards, [ROW, ROW])
    with pytest.raises(Fatal, match=f"offset {offset} was delivered, 2 must follow"):
        buffer.add(Reader(DATASET).read([record(ROW, offset)])[0], of_shards.seen, 1.0)


def test_a_gap_is_counted_and_the_record_before_it_is_not_the_last_one_any_more() -> None:
    of_shards = chain()
    buffer = fill(Buffer(0, None), of_shards, [ROW])
    buffer.skip(10, 1.0)
    assert (buffer.end, buffer.gap, buffer.last_id) == (10, 9, None)
    fill(buffer, of_shards, [make_sequence(OTHER)])
    assert (buffer.end, len(buffer.rows)) == (11, 2)


def test_memory_is_counted() -> None:
    of_shards = chain()
    small = fill(Buffer(0, None), of_shards, [ROW])
    large = fill(Buffer(0, None), of_shards, [make_sequence(NUMBER, [7] * 100_000)])
    assert large.nbytes - small.nbytes == pytest.approx(4 * 100_000, rel=0.01)


def test_records_with_an_outcome_are_counted_once_by_source_and_after_a_restart_too() -> None:
    store = MemoryStore()
    chain = Chain(store, DATASET, 0, "writer")
    shards: list[list[Outcome | bytes]] = [[FAILURE, make_sequence(OTHER)], [ROW, make_sequence(OTHER)]]
    for outcomes in shards:
        assert chain.commit(fill(Buffer(chain.tail, chain.last_id), chain, outcomes))
    again = Chain(store, DATASET, 0, "another")
    again.refresh()
    assert chain.outcomes == again.outcomes == {"test": 2}
