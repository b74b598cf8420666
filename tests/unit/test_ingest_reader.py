"""All files of all sources are read to their ends, in turns, while they grow, come and go."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec
import pytest

from services.ingest.lines import Growing, Mark
from services.ingest.reader import Reader
from services.ingest.sources import Sample, Source, Sources
from services.ingest.turn import Progress

TEN = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(folder: Path, name: str, count: int) -> None:
    with (folder / name).open("a") as out:
        out.writelines(f"{name} {number}\n" for number in range(count))


def reader(folder: Path, clock: Clock, *sources: Source, take_rest: bool = False, begin: Mark | None = None) -> Reader:
    return Reader(
        Sources(folder, list(sources)),
        {source.name: {"a.jsonl": begin} for source in sources} if begin else {},
        batch_records=4,
        scan_seconds=TEN,
        take_rest=take_rest,
        clock=clock,
    )


def source(name: str, samples: int = 1) -> Source:
    return Source(name=name, files=[f"{name}*.jsonl"], max_new_tokens=1, samples=samples)


def rest(reader: Reader) -> list[tuple[str, int]]:
    batches = []
    while batch := reader.next():
        batches.append((batch.file, len(batch.lines)))
    return batches


def test_a_small_source_does_not_wait_for_a_huge_one(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a.jsonl", 12)
    write(tmp_path, "b.jsonl", 5)
    batches = rest(reader(tmp_path, clock, source("a"), source("b")))
    assert batches == [("a.jsonl", 4), ("b.jsonl", 4), ("a.jsonl", 4), ("b.jsonl", 1), ("a.jsonl", 4)]


def test_a_batch_is_counted_in_prompts(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a.jsonl", 3)
    assert rest(reader(tmp_path, clock, source("a", samples=2))) == [("a.jsonl", 2), ("a.jsonl", 1)]
    assert rest(reader(tmp_path, clock, source("a", samples=9))) == [("a.jsonl", 1)] * 3


def test_a_new_file_and_new_lines_are_seen_before_all_is_called_read(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a1.jsonl", 1)
    reading = reader(tmp_path, clock, source("a"))
    assert rest(reading) == [("a1.jsonl", 1)]
    write(tmp_path, "a1.jsonl", 2)
    write(tmp_path, "a2.jsonl", 3)
    assert rest(reading) == [("a1.jsonl", 2), ("a2.jsonl", 3)]


def test_a_busy_reader_looks_for_files_when_it_is_time(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "b.jsonl", 40)
    reading = reader(tmp_path, clock, source("a"), source("b"))
    assert reading.next() is not None
    write(tmp_path, "a.jsonl", 1)
    assert {batch.file for _ in range(3) if (batch := reading.next())} == {"b.jsonl"}
    clock.now += TEN
    assert {batch.file for _ in range(2) if (batch := reading.next())} == {"a.jsonl", "b.jsonl"}


def test_reading_begins_where_the_cursor_stands(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a.jsonl", 3)
    first = reader(tmp_path, clock, source("a", samples=2)).next()
    assert first is not None
    assert rest(reader(tmp_path, clock, source("a"), begin=first.mark)) == [("a.jsonl", 1)]


def test_a_replaced_file_is_told_of_and_read_again(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a.jsonl", 3)
    reading = reader(tmp_path, clock, source("a"))
    rest(reading)
    (tmp_path / "a.jsonl").write_text("other\n")
    with caplog.at_level(logging.WARNING):
        assert rest(reading) == [("a.jsonl", 1)]
    assert "a.jsonl was replaced" in caplog.text


def test_a_file_that_goes_away_holds_nobody_up(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a1.jsonl", 8)
    write(tmp_path, "a2.jsonl", 1)
    reading = reader(tmp_path, clock, source("a"))
    reading.next()
    (tmp_path / "a1.jsonl").unlink()
    assert rest(reading) == [("a2.jsonl", 1)]


def test_a_last_line_without_newline_is_taken_only_when_this_is_the_end(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "a.jsonl").write_text("one\ntwo")
    assert rest(reader(tmp_path, clock, source("a"))) == [("a.jsonl", 1)]
    assert rest(reader(tmp_path, clock, source("a"), take_rest=True)) == [("a.jsonl", 2)]


def test_progress_is_bytes_read_and_bytes_there(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "a.jsonl").write_text("1234\n" * 8)
    reading = reader(tmp_path, clock, source("a"), source("b"))
    reading.next()
    assert reading.progress == {"a": Progress(20, 40, None, 0), "b": Progress(0, 0, None, 0)}
    rest(reading)
    assert reading.progress["a"] == Progress(40, 40, None, 0)


def test_what_is_passed_over_in_a_folder_is_told_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data.csv").touch()
    reading = reader(tmp_path, clock, Source(name="a", files=["in"], max_new_tokens=1))
    with caplog.at_level(logging.WARNING):
        reading.scan()
        reading.scan()
    assert caplog.text.count("'in/data.csv' is passed over") == 1


def test_a_source_of_more_weight_gets_more(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a.jsonl", 400)
    write(tmp_path, "b.jsonl", 400)
    heavy = msgspec.structs.replace(source("a"), weight=3.0)
    reading = reader(tmp_path, clock, heavy, source("b"))
    first = [reading.next() for _ in range(40)]
    assert [batch.file for batch in first if batch].count("a.jsonl") == 30


def test_a_source_that_had_nothing_has_no_claim_to_what_it_missed(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "b.jsonl", 400)
    reading = reader(tmp_path, clock, source("a"), source("b"))
    for _ in range(40):
        reading.next()
    write(tmp_path, "a.jsonl", 400)
    reading.scan()
    assert [batch.file for _ in range(40) if (batch := reading.next())].count("a.jsonl") <= 21


def test_a_limit_counts_what_was_taken_before_too(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a1.jsonl", 3)
    write(tmp_path, "a2.jsonl", 30)
    limited = msgspec.structs.replace(source("a"), limit=9)
    reading = reader(tmp_path, clock, limited)
    taken = [batch for _ in range(2) if (batch := reading.next())]
    marks = {"a": {batch.file: batch.mark for batch in taken}}
    again = Reader(Sources(tmp_path, [limited]), marks, batch_records=4, scan_seconds=TEN, take_rest=False)
    assert rest(again) == [("a2.jsonl", 2)]
    assert rest(reading) == [("a2.jsonl", 2)]


def test_a_sample_is_the_same_whatever_the_files(tmp_path: Path, clock: Clock) -> None:
    records = [f'{{"prompt": "{number}"}}\n' for number in range(2000)]
    (tmp_path / "a.jsonl").write_text("".join(records))
    (tmp_path / "b1.jsonl").write_text("".join(reversed(records[:700])))
    (tmp_path / "b2.jsonl").write_text("".join(records[700:]))
    sample = Sample(fraction=0.1, seed=7)
    both = [msgspec.structs.replace(source(name), sample=sample) for name in "ab"]
    taken: dict[str, list[bytes]] = {"a": [], "b": []}
    reading = reader(tmp_path, clock, *both)
    while batch := reading.next():
        taken[batch.source.name] += [line.data for line in batch.lines]
    assert sorted(taken["a"]) == sorted(taken["b"])
    assert 150 < len(taken["a"]) < 250
    other = msgspec.structs.replace(source("a"), sample=Sample(fraction=0.1, seed=8))
    reading = reader(tmp_path, clock, other)
    assert [line.data for batch in iter(reading.next, None) for line in batch.lines] != taken["a"]


def test_a_renamed_file_is_read_on_and_the_new_one_in_its_place_from_its_start(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, "a.jsonl", 6)
    reading = reader(tmp_path, clock, source("a"))
    first = reading.next()
    assert first is not None
    (tmp_path / "a.jsonl").rename(tmp_path / "a-old.jsonl")
    write(tmp_path, "a.jsonl", 1)
    reading.scan()
    assert rest(reading) == [("a-old.jsonl", 2), ("a.jsonl", 1)]
    after_restart = reader(tmp_path, clock, source("a"), begin=first.mark)
    assert rest(after_restart) == [("a-old.jsonl", 2), ("a.jsonl", 1)]


def test_a_file_that_cannot_be_read_waits_until_it_changes(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    half = tmp_path / "a.json"
    half.write_text('[{"half": ')
    write(tmp_path, "a.jsonl", 1)
    reading = reader(tmp_path, clock, Source(name="a", files=["*"], max_new_tokens=1))
    assert rest(reading) == [("a.jsonl", 1)]
    assert not caplog.text, "it is being written: nothing is said yet"
    os.utime(half, (0, time.time() - TEN))
    assert rest(reading) == []
    reading.scan()
    assert reading.progress["a"].broken == 1
    assert caplog.text.count("a.json cannot be read") == 1
    half.write_text('[{"half": 1}]')
    assert rest(reading) == []
    os.utime(half, (0, time.time() - TEN))
    assert rest(reading) == [("a.json", 1)]
    assert not reading.stopped


def test_a_file_the_system_does_not_give_is_asked_for_again(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    write(tmp_path, "a.jsonl", 1)
    reading = reader(tmp_path, clock, source("a"))
    with monkeypatch.context() as patch:
        patch.setattr(Growing, "read", refused)
        for _ in range(3):
            assert rest(reading) == []
        reading.scan()
        assert reading.progress["a"].broken == 1
    assert caplog.text.count("a.jsonl cannot be read") == 1
    assert rest(reading) == [("a.jsonl", 1)], "a chmod, or a mount that came back, changes neither size nor time"
    reading.scan()
    assert reading.progress["a"].broken == 0


def test_at_the_end_of_all_a_broken_file_is_an_error_of_its_source_alone(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    write(tmp_path, "b.jsonl", 1)
    broken = Source(name="a", files=["a.jsonl.gz"], max_new_tokens=1)
    reading = reader(tmp_path, clock, broken, source("b"), take_rest=True)
    assert rest(reading) == [("b.jsonl", 1)]
    assert reading.stopped == {"a": "a.jsonl.gz cannot be read: Not a gzipped file (b'no')"}
