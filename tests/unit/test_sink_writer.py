"""Partitions come and go, stores fail, others write: the chain stays whole and every record ends up in it once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord

from services.kernel.errors import Fatal, Retry
from services.kernel.store import LocalStore
from services.sink.arrivals import Arrival, Reader
from services.sink.verify import verify
from tests.support.outcomes import TOPIC, make_failure, numbers_in
from tests.support.sink_bench import ROWS, Bench
from tests.support.stream import eventually


async def test_a_full_shard_is_committed_and_kafka_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_rows=5)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0, 1)
    await bench.read()
    assert bench.shards() == [(0, 5), (5, 5)]
    assert bench.consumer.commits == {0: 10, 1: 0}
    assert bench.metric("sink_rows_total", source="test") == 10
    assert bench.metric("sink_tokens_total", kind="prompt", source="test") == 40
    assert bench.metric("sink_tokens_total", kind="output", source="test") == 30
    assert bench.metric("sink_buffer_rows") == 2
    assert bench.metric("records_in_progress", stage="sink") == 2
    assert bench.metric("sink_chain_tail_offset", partition="0") == 10
    assert bench.metric("consumer_lag_records", topic=TOPIC, partition="0") == 2
    assert bench.metric("sink_record_age_seconds_count") == 10


async def test_old_shards_are_committed_without_being_full(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_age_seconds=1e-9)
    bench.consumer.append(0, ROWS[0], ROWS[0])
    await bench.assign(0)
    await bench.read()
    bench.consumer.append(0, ROWS[0])
    await bench.read()
    assert bench.shards() == [(0, 1), (2, 0)]
    assert bench.metric("sink_duplicates_total") == 2
    assert verify(tmp_path).ok


async def test_a_pause_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    await bench.assign(0)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    await bench.read()
    monkeypatch.setattr(time, "time", lambda: 6000.0)
    bench.consumer.append(0, *ROWS[:2])
    await bench.read()
    assert bench.metric("sink_last_commit_timestamp_seconds") == 5000, "what came has waited since then at most"


async def test_who_comes_next_goes_on_at_the_tail(tmp_path: Path) -> None:
    first = Bench(tmp_path, max_rows=5)
    first.consumer.append(0, *ROWS)
    await first.assign(0)
    await first.read()
    second = Bench(tmp_path, first.consumer)
    await second.assign(0)
    assert second.consumer.positions == {0: 9}  # the last record of the chain: its id is looked at
    second.consumer.append(0, ROWS[0], ROWS[11])
    await second.read()
    await second.writer.flush()
    assert second.shards() == [(0, 5), (5, 5), (10, 2)]
    assert second.metric("sink_duplicates_total") == 2
    assert verify(tmp_path).ok


async def test_another_topic_under_the_same_name_ends_the_service(tmp_path: Path) -> None:
    first = Bench(tmp_path, max_rows=2)
    first.consumer.append(0, *ROWS[:2])
    await first.assign(0)
    await first.read()
    second = Bench(tmp_path)
    second.consumer.append(0, *ROWS[2:])
    await second.assign(0)
    with pytest.raises(Fatal, match=r"offset 1 holds record .* but the chain has .* the topic was made anew"):
        await second.read()


async def test_a_topic_shorter_than_the_chain_ends_the_service(tmp_path: Path) -> None:
    first = Bench(tmp_path, max_rows=5)
    first.consumer.append(0, *ROWS)
    await first.assign(0)
    await first.read()
    second = Bench(tmp_path)
    second.consumer.append(0, ROWS[0])
    await second.consumer.rebalance(0)
    await eventually(lambda: bool(second.errors))
    assert "the chain of test.sequences/0 ends at 10, the topic at 1" in str(second.errors[0])


async def test_deleted_records_end_the_service(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, *ROWS)
    bench.consumer.begins[0] = 4
    await bench.consumer.rebalance(0)
    await eventually(lambda: bool(bench.errors))
    assert "4 records of test.sequences/0 were deleted" in str(bench.errors[0])
    assert "TOKENHAUL_SINK_ON_GAP=continue" in str(bench.errors[0])
    assert bench.metric("sink_offset_gap_records_total") == 4


async def test_deleted_records_are_left_out_when_that_is_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_gap="continue", max_rows=4)
    bench.consumer.append(0, *ROWS)
    bench.consumer.begins[0] = 4
    await bench.assign(0)
    await bench.read()
    assert bench.shards() == [(0, 4), (8, 4)]
    assert bench.metric("sink_offset_gap_records_total") == 4
    report = verify(tmp_path)
    assert report.ok
    assert report.gap == 4


async def test_who_loses_reads_the_winners_shards_and_goes_on(tmp_path: Path) -> None:
    zombie, owner = Bench(tmp_path, max_rows=100), Bench(tmp_path, max_rows=5)
    for bench in (zombie, owner):
        bench.consumer.append(0, *ROWS)
        await bench.assign(0)
        await bench.read()
    assert owner.shards() == [(0, 5), (5, 5)]
    await zombie.writer.flush()
    assert zombie.metric("sink_commit_conflicts_total") == 1
    assert zombie.metric("sink_rows_total", source="test") is None
    await zombie.finish()
    assert owner.shards() == [(0, 5), (5, 5), (10, 2)]
    assert verify(tmp_path).rows == len(ROWS)
    assert verify(tmp_path).ok


def failing(times: int) -> Callable[[], None]:
    left = [times]

    def fail() -> None:
        if left[0]:
            left[0] -= 1
            raise Retry("store", "away")

    return fail


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_store_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr("services.kernel.retry.Backoff.next", lambda self: 0.0)
    bench = Bench(tmp_path, max_rows=5)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    setattr(bench.store, when, failing(2))
    await bench.read()
    assert bench.metric("retries_total", stage="sink", cause="store") == 2
    await bench.finish()
    report = verify(tmp_path)
    assert report.ok
    assert report.rows == len(ROWS)


async def test_a_commit_that_failed_waits_before_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_rows=5)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    bench.store.before = failing(1)
    await bench.read()
    assert bench.shards() == []
    assert bench.metric("sink_buffer_rows") == len(ROWS)


async def test_failures_are_published_before_their_shard_is_committed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    failures = [make_failure(number) for number in numbers_in(0, 2)]
    bench.consumer.append(0, *failures, failures[0], ROWS[5])
    await bench.assign(0)
    await bench.read()
    committed_then: list[list[tuple[int, int]]] = []
    bench.letters.before = lambda: committed_then.append(bench.shards())
    await bench.writer.flush()
    assert committed_then == [[]]
    # What fails again after a replay counts once, and is told again.
    assert bench.letters.ids == [failure.id for failure in (*failures, failures[0])]
    assert bench.shards() == [(0, 1)]
    assert bench.metric("sink_failures_total", reason="engine_rejected") == 2


async def test_no_shard_without_its_dead_letters(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, make_failure(numbers_in(0, 1)[0]))
    await bench.assign(0)
    await bench.read()
    bench.letters.before = failing(1)
    await bench.writer.flush()
    assert bench.shards() == []


async def test_a_partition_is_committed_before_it_goes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0, 1)
    await bench.read()
    await bench.assign(1)
    assert bench.shards() == [(0, len(ROWS))]
    assert bench.consumer.commits[0] == len(ROWS)
    bench.writer.report()
    assert bench.metric("sink_chain_tail_offset", partition="0") is None


async def test_an_open_shard_is_kept_over_a_rebalance_that_could_not_commit_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    await bench.read()
    bench.store.before = failing(1)
    await bench.assign(0)
    assert bench.consumer.positions == {0: len(ROWS) - 1}
    await bench.read()
    assert bench.metric("sink_buffer_rows") == len(ROWS)
    assert bench.metric("records_in_total", stage="sink") == len(ROWS) + 1  # the last one, to see that it is the same


async def test_records_polled_before_a_rebalance_are_not_taken_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, *ROWS[:4])
    await bench.assign(0)
    await bench.read()
    bench.consumer.append(0, *ROWS[4:])
    committing, commit, read = threading.Event(), threading.Event(), threading.Event()

    def wait_to_commit() -> None:
        committing.set()
        commit.wait(30)

    reader_read = Reader.read

    def wait_to_read(self: Reader, records: list[ConsumerRecord]) -> dict[int, list[Arrival]]:
        read.wait(30)
        return reader_read(self, records)

    bench.store.before = wait_to_commit
    rebalance = asyncio.create_task(bench.consumer.rebalance(0))
    await asyncio.to_thread(committing.wait, 30)
    monkeypatch.setattr(Reader, "read", wait_to_read)
    member = bench.writer.member
    late = asyncio.create_task(bench.writer.take(await member.poll(10, [0])))
    await asyncio.sleep(0)
    commit.set()
    await rebalance
    await bench.loaded()
    read.set()
    await late
    await bench.finish()
    assert bench.shards() == [(0, 4), (4, 8)]
    assert verify(tmp_path).ok


async def test_caught_up_is_the_end_of_what_is_there_committed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0, 1)
    assert not await bench.writer.caught_up()
    await bench.read()
    bench.store.before = failing(1)
    assert not await bench.writer.caught_up()
    bench.writer.member.states[0].not_before = 0.0
    assert await bench.writer.caught_up()
    assert bench.shards() == [(0, len(ROWS))]


async def test_a_member_without_partitions_is_ready_and_has_nothing_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert not bench.writer.member.loaded
    await bench.assign()
    assert await bench.writer.caught_up()


async def test_a_chain_that_is_not_whole_ends_the_service(tmp_path: Path) -> None:
    first = Bench(tmp_path, max_rows=4)
    first.consumer.append(0, *ROWS)
    await first.assign(0)
    await first.read()
    (tmp_path / "test" / "partition=00000" / f"{4:020d}.parquet").unlink()
    second = Bench(tmp_path, first.consumer)
    await second.consumer.rebalance(0)
    await eventually(lambda: bool(second.errors))
    assert f"{8:020d}.parquet begins at 8, but the shards before it end at 4" in str(second.errors[0])


async def test_a_store_that_is_away_delays_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kernel.retry.Backoff.next", lambda self: 0.0)
    bench = Bench(tmp_path)
    fail, listed = failing(2), LocalStore(tmp_path).list

    def list_(folder: str) -> list[str]:
        fail()
        return listed(folder)

    monkeypatch.setattr(bench.store, "list", list_)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    await bench.read()
    assert not bench.errors
    assert bench.metric("retries_total", stage="sink", cause="store") == 2


async def test_a_partition_the_dataset_does_not_have_ends_the_service(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.consumer.rebalance(0, 3)
    await eventually(lambda: bool(bench.errors))
    (error,) = bench.errors
    assert isinstance(error, Fatal)
    assert "has a partition 3, dataset 'test' has 3: partitions were added" in str(error)


async def test_the_hook_returns_before_anything_is_loaded(tmp_path: Path) -> None:
    bench, answers = Bench(tmp_path), threading.Event()
    bench.store.before_list = answers.wait
    bench.consumer.append(0, *ROWS)
    await bench.consumer.rebalance(0)  # would wait for ever
    assert not bench.writer.member.loaded
    assert await bench.turn() == 0  # records of a partition that is not ready are left alone
    answers.set()
    await bench.loaded()
    await bench.read()
    assert bench.metric("sink_buffer_rows") == len(ROWS)


async def test_the_index_is_kept_while_nobody_else_has_written(tmp_path: Path) -> None:
    bench, opened = Bench(tmp_path, max_rows=4), list[str]()
    bench.consumer.append(0, *ROWS[:8])
    await bench.assign(0)
    await bench.read()
    assert bench.shards() == [(0, 4), (4, 4)]
    bench.store.before_open = opened.append
    await bench.assign(0)
    bench.consumer.append(0, *ROWS[:8], *ROWS[8:])
    await bench.finish()
    assert opened == []
    assert (bench.metric("sink_duplicates_total"), verify(tmp_path).rows) == (8, len(ROWS))


async def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, max_age_seconds=1000)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    for clock in (0.0, 4e9, 1.0):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        await bench.read()
    assert bench.shards() == []  # neither old nor young: ages are no affair of that clock
    await bench.finish()
    assert bench.shards() == [(0, len(ROWS))]
    assert bench.metric("sink_record_age_seconds_sum") == 0
    assert verify(tmp_path).ok


async def test_shards_that_were_there_once_are_missed_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path / "one")
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    await bench.finish()
    again = Bench(tmp_path / "one", bench.consumer)
    await again.assign(0)
    assert "the chain ends at" not in caplog.text  # the same root: nothing is missing
    elsewhere = Bench(tmp_path / "two", bench.consumer)
    await elsewhere.assign(0)
    assert (
        f"{TOPIC}/0 was in shards up to offset 12, the chain ends at 0: was TOKENHAUL_SINK_ROOT changed" in caplog.text
    )
    await elsewhere.finish()
    assert elsewhere.shards() == [(0, len(ROWS))]
