"""Whatever a file holds and wherever reading stops, every line is taken exactly once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.ingest import cursor
from services.ingest.lines import Line, Mark
from tests.support.ingest import read_lines

LIMIT = 40

contents = st.lists(st.one_of(st.binary(max_size=60), st.just(b""), st.just(b"{}")), max_size=20).map(b"\n".join)


def expected(content: bytes, take_rest: bool) -> list[tuple[int, bytes | None]]:
    """(row, line, None for one too long), told in another way than the code does it."""
    pieces = content.split(b"\n")
    if not (take_rest and pieces[-1]):
        pieces.pop()
    pieces = [piece.removeprefix(b"\xef\xbb\xbf") if row == 0 else piece for row, piece in enumerate(pieces)]
    lengths = [len(piece) for piece in content.split(b"\n")]
    return [
        (row, None if length > LIMIT else piece.strip())
        for row, (piece, length) in enumerate(zip(pieces, lengths, strict=False), 1)
        if length > LIMIT or piece.strip()
    ]


def told(lines: list[Line]) -> list[tuple[int, bytes | None]]:
    return [(line.row, None if line.too_long else line.data) for line in lines]


@given(content=contents, max_lines=st.integers(1, 5), buffer_bytes=st.integers(1, 50), take_rest=st.booleans())
def test_lines_are_split_alike_whatever_the_chunks(
    content: bytes, max_lines: int, buffer_bytes: int, take_rest: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "f.jsonl"
        file.write_bytes(content)
        taken: list[Line] = []
        mark = Mark()
        while True:
            read = read_lines(
                file, mark, max_lines=max_lines, take_rest=take_rest, max_line_bytes=LIMIT,
                buffer_bytes=max(2, buffer_bytes),
            )  # fmt: skip
            assert not read.replaced
            taken += read.lines
            if read.mark == mark:
                break
            mark = read.mark
        assert told(taken) == expected(content, take_rest)
        whole = content if take_rest else content[: content.rfind(b"\n") + 1]
        assert mark.offset == len(whole)


@given(content=contents, cuts=st.lists(st.integers(0, 600), max_size=6), steps=st.lists(st.integers(1, 4), max_size=6))
def test_a_restart_at_any_line_of_a_growing_file_loses_and_repeats_nothing(
    content: bytes, cuts: list[int], steps: list[int]
) -> None:
    """The file grows to each cut; between, some lines are taken and only the cursor survives."""
    content += b"\n"
    stored = None
    taken: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "f.jsonl"
        for cut, max_lines in [*zip(sorted(cuts), steps, strict=False), (len(content), 1000)]:
            file.write_bytes(content[:cut])
            at = cursor.resume(stored, "s", "f", 0, b"asked")
            read = read_lines(file, cursor.mark_of(at), max_lines=max_lines, max_line_bytes=LIMIT)
            assert not read.replaced
            taken += read.lines
            stored = cursor.advance(at, read.mark, len(read.lines), 0, {})
    assert told(taken) == expected(content, False)
    assert stored is not None
    assert (stored.offset, stored.published) == (len(content), len(taken))
