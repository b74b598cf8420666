"""Lines of a file that grows, is half written, or is not the file it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.ingest.lines import HEAD_BYTES, KEPT_BYTES, MAX_BATCH_BYTES, Line, Mark
from tests.support.ingest import read_lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "f.jsonl"


def append(file: Path, data: bytes) -> None:
    with file.open("ab") as out:
        out.write(data)


def test_a_growing_file_is_read_on_from_where_it_was_left(file: Path) -> None:
    append(file, b"one\ntwo\n")
    first = read_lines(file, Mark(), max_lines=10)
    assert first.lines == [Line(1, b"one"), Line(2, b"two")]
    assert (first.mark.offset, first.mark.row) == (8, 2)
    append(file, b"three\n")
    second = read_lines(file, first.mark, max_lines=10)
    assert (second.lines, second.replaced) == ([Line(3, b"three")], False)
    assert read_lines(file, second.mark, max_lines=10).mark == second.mark


def test_no_more_lines_than_asked_for(file: Path) -> None:
    append(file, b"1\n2\n3\n")
    first = read_lines(file, Mark(), max_lines=2)
    assert [line.data for line in first.lines] == [b"1", b"2"]
    assert [line.data for line in read_lines(file, first.mark, max_lines=2).lines] == [b"3"]


def test_a_batch_is_bounded_in_bytes_too(file: Path) -> None:
    append(file, (b"x" * (MAX_BATCH_BYTES // 2) + b"\n") * 3)
    assert len(read_lines(file, Mark(), max_lines=10).lines) == 2


def test_half_a_line_waits_until_it_is_whole(file: Path) -> None:
    append(file, b'one\n{"half": ')
    first = read_lines(file, Mark(), max_lines=10)
    assert first.lines == [Line(1, b"one")]
    append(file, b'"now"}\n')
    assert read_lines(file, first.mark, max_lines=10).lines == [Line(2, b'{"half": "now"}')]


def test_the_rest_is_taken_as_it_is_when_asked_for(file: Path) -> None:
    append(file, b"one\ntwo")
    taken = read_lines(file, Mark(), max_lines=10, take_rest=True)
    assert taken.lines == [Line(1, b"one"), Line(2, b"two")]
    append(file, b"\nthree\n")
    again = read_lines(file, taken.mark, max_lines=10, take_rest=True)
    assert [line.data for line in again.lines] == [b"three"]


def test_blank_lines_are_counted_and_windows_endings_and_marks_are_no_part_of_a_line(file: Path) -> None:
    append(file, b"\xef\xbb\xbfone\r\n\r\n  \ntwo\r\n")
    assert read_lines(file, Mark(), max_lines=10).lines == [Line(1, b"one"), Line(4, b"two")]


@pytest.mark.parametrize("length", [99, 100, 101, 250])
@pytest.mark.parametrize("ending", [b"\n", b""])
def test_a_line_too_long_is_passed_without_being_held(file: Path, length: int, ending: bytes) -> None:
    append(file, b"a\n" + b"x" * length + ending)
    taken = read_lines(file, Mark(), max_lines=10, take_rest=True, max_line_bytes=100)
    assert [(line.row, line.too_long) for line in taken.lines] == [(1, False), (2, length > 100)]
    assert taken.mark.offset == file.stat().st_size
    append(file, b"\nafter\n")
    assert read_lines(file, taken.mark, max_lines=10).lines[-1].data == b"after"


def test_of_a_line_too_long_only_the_beginning_is_kept(file: Path) -> None:
    append(file, b"x" * (KEPT_BYTES + 10) + b"\n")
    (line,) = read_lines(file, Mark(), max_lines=10, max_line_bytes=KEPT_BYTES + 1).lines
    assert line == Line(1, b"x" * KEPT_BYTES, too_long=True)


@pytest.mark.parametrize("content", [b"other\nthing\nmore\n", b"one\n", b""], ids=["head differs", "shorter", "empty"])
def test_a_replaced_file_is_read_from_its_start(file: Path, content: bytes) -> None:
    append(file, b"one\ntwo\n")
    mark = read_lines(file, Mark(), max_lines=10).mark
    file.write_bytes(content)
    taken = read_lines(file, mark, max_lines=10)
    assert taken.replaced
    assert [(line.row, line.data) for line in taken.lines] == list(enumerate(content.split(), 1))
    assert not read_lines(file, taken.mark, max_lines=10).replaced


def test_a_long_file_cut_short_is_another_file(file: Path) -> None:
    append(file, b"x" * HEAD_BYTES + b"\ny\nz\n")
    mark = read_lines(file, Mark(), max_lines=10).mark
    with file.open("r+b") as cut:
        cut.truncate(HEAD_BYTES + 3)
    taken = read_lines(file, mark, max_lines=10)
    assert taken.replaced
    assert [line.row for line in taken.lines] == [1, 2]


def test_a_file_with_the_same_beginning_is_another_file_when_it_differs_where_reading_stopped(file: Path) -> None:
    append(file, b"x" * HEAD_BYTES + b"\none\ntwo\n")
    mark = read_lines(file, Mark(), max_lines=2).mark
    file.write_bytes(b"x" * HEAD_BYTES + b"\nONE\ntwo\nthree\n")
    taken = read_lines(file, mark, max_lines=10)
    assert taken.replaced
    assert len(taken.lines) == 4


def test_a_mark_says_whether_the_file_was_read_to_its_end(file: Path) -> None:
    append(file, b"one\ntwo\n")
    first = read_lines(file, Mark(), max_lines=1).mark
    assert not first.complete
    second = read_lines(file, first, max_lines=9).mark
    assert second.complete
    append(file, b"half")
    assert not read_lines(file, second, max_lines=9).mark.complete
