"""Lines of files that grow, a batch at a time: where a file was left is a value, nothing is kept open in between.

A last line without its newline may still be written: it waits, unless the rest is asked for. A file is known by the
hashes of its beginning and of what stands before the place where reading stopped: when one of them differs, or the file
is shorter than what was read, another file stands in its place. Its inode is only a hint where to look after a rename.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from hashlib import blake2b
from typing import BinaryIO

import msgspec

MAX_LINE_BYTES = 16 * 1024 * 1024
KEPT_BYTES = 64 * 1024  # of a line that is too long
HEAD_BYTES = 64 * 1024
TAIL_BYTES = 4 * 1024
MAX_BATCH_BYTES = 8 * 1024 * 1024  # a line more than that is still taken
_BOM = b"\xef\xbb\xbf"


class Mark(msgspec.Struct, frozen=True):
    """How far a file is read: bytes, lines (rows, for what has no lines), and by what the file is known again.

    `records` counts what was handed on since `offset` 0; `complete`: it was read to the end it had."""

    offset: int = 0
    row: int = 0
    head: bytes = b""
    head_bytes: int = 0
    tail: bytes = b""
    tail_bytes: int = 0
    inode: int = 0
    records: int = 0
    complete: bool = False


class Line(msgspec.Struct, frozen=True):
    """A line that is not blank, without its newline; `row` counts from 1. Of a line too long only the beginning."""

    row: int
    data: bytes
    too_long: bool = False


class Lines(msgspec.Struct, frozen=True):
    """What was read, how far, and whether it began anew because the file was replaced."""

    lines: list[Line]
    mark: Mark
    replaced: bool


class Growing:
    """A file of lines to which more may be written. Nothing is kept open between two reads."""

    rows: int | None = None

    def __init__(self, open: Callable[[], BinaryIO]) -> None:
        self._open = open

    def is_same(self, mark: Mark) -> bool:
        """Whether this is the file that `mark` was made in."""
        with self._open() as file:
            return is_same(file, mark)

    def read(self, mark: Mark, *, max_lines: int, take_rest: bool = False) -> Lines:
        """Up to `max_lines` lines behind `mark`; with `take_rest` a last line without newline is one.

        Raises OSError."""
        with self._open() as file:
            return take_lines(file, mark, max_lines=max_lines, take_rest=take_rest)

    def close(self) -> None:
        """Nothing is open."""


class Whole:
    """One version of an object of lines: what is there is all, and it stays what it is. It stays open between reads."""

    rows: int | None = None

    def __init__(self, open: Callable[[], BinaryIO], size: int) -> None:
        self._open, self._size = open, size
        self._file: BinaryIO | None = None

    def is_same(self, mark: Mark) -> bool:
        """Whether it goes on from what `mark` was made in."""
        with self._open() as file:
            return self._size >= mark.offset and is_same(file, mark)

    def read(self, mark: Mark, *, max_lines: int, take_rest: bool = False) -> Lines:
        """Up to `max_lines` lines behind `mark`. Raises OSError."""
        known = self._file is not None
        file = self._file = self._file or self._open()
        return take_lines(file, mark, max_lines=max_lines, take_rest=True, size=self._size, known=known)

    def close(self) -> None:
        """The next read opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def take_lines(
    file: BinaryIO,
    mark: Mark,
    *,
    max_lines: int,
    take_rest: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
    size: int | None = None,
    known: bool = False,
) -> Lines:
    """See Growing.read. `size`: of the file, where that is fixed; `known`: it is the one that `mark` was made in."""
    replaced = not known and not is_same(file, mark)
    if replaced:
        mark = Mark()
    file.seek(mark.offset)
    lines: list[Line] = []
    offset, row = mark.offset, mark.row
    while row - mark.row < max_lines and offset - mark.offset < MAX_BATCH_BYTES:
        taken = next_line(file, max_line_bytes, take_rest)
        if taken is None:
            break
        data, length, too_long = taken
        offset, row = offset + length, row + 1
        if line := as_line(row, data, too_long):
            lines.append(line)
    new = Mark(offset, row, *_head(file, mark, offset), *_tail(file, mark, offset), mark.inode, mark.records)
    return Lines(
        lines, msgspec.structs.replace(new, complete=offset == (size_of(file) if size is None else size)), replaced
    )


def as_line(row: int, data: bytes, too_long: bool) -> Line | None:
    """What was read as a line: None when it is blank."""
    if row == 1:
        data = data.removeprefix(_BOM)
    if too_long:
        return Line(row, data[:KEPT_BYTES], too_long=True)
    return Line(row, stripped) if (stripped := data.strip()) else None


def next_line(file: BinaryIO, limit: int, take_rest: bool) -> tuple[bytes, int, bool] | None:
    """(the line, its length with newline, whether it is longer than `limit` bytes, of which only those are read), or
    None when there is none yet."""
    data = kept = file.readline(limit + 1)
    length, complete = len(data), data.endswith(b"\n")
    too_long = length > limit and not complete
    if too_long:
        while not complete and (data := file.readline(limit)):
            length, complete = length + len(data), data.endswith(b"\n")
    return (kept, length, too_long) if complete or (take_rest and length) else None


def size_of(file: BinaryIO) -> int:
    """Its size now."""
    return file.seek(0, io.SEEK_END)


def is_same(file: BinaryIO, mark: Mark) -> bool:
    """Whether the file is the one that was read, as far as it was read."""
    if not mark.offset:
        return True
    if size_of(file) < mark.offset:
        return False
    return (
        _digest(file, 0, mark.head_bytes) == mark.head
        and (not mark.tail_bytes or _digest(file, mark.offset - mark.tail_bytes, mark.tail_bytes) == mark.tail)
    )  # fmt: skip


def _digest(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return blake2b(file.read(length), digest_size=16).digest()


def _head(file: BinaryIO, mark: Mark, offset: int) -> tuple[bytes, int]:
    size = min(offset, HEAD_BYTES)
    return (mark.head, size) if size == mark.head_bytes else (_digest(file, 0, size), size)


def _tail(file: BinaryIO, mark: Mark, offset: int) -> tuple[bytes, int]:
    if offset == mark.offset:
        return mark.tail, mark.tail_bytes
    size = min(offset, TAIL_BYTES)
    return _digest(file, offset - size, size), size
