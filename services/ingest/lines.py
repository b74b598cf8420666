"""Lines of files that grow, a batch at a time: where a file was left is a value, nothing is kept open in between.

A last line without its newline may still be written: it waits, unless the rest is asked for. A file is known by the
hash of its beginning: when that differs, or the file is shorter than what was read, another file stands in its place.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.kernel.errors import Fatal

MAX_LINE_BYTES = 16 * 1024 * 1024
KEPT_BYTES = 64 * 1024  # of a line that is too long
HEAD_BYTES = 64 * 1024
MAX_BATCH_BYTES = 8 * 1024 * 1024  # a line more than that is still taken
_BOM = b"\xef\xbb\xbf"


class Mark(msgspec.Struct, frozen=True):
    """How far a file is read: the byte after the last line taken, the number of lines, and the file's beginning."""

    offset: int = 0
    row: int = 0
    head: bytes = b""
    head_bytes: int = 0


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


def read_lines(
    path: Path,
    mark: Mark,
    *,
    max_lines: int,
    take_rest: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
    buffer_bytes: int = 1024 * 1024,
) -> Lines:
    """Up to `max_lines` lines behind `mark`; with `take_rest` a last line without newline is one.

    Raises FileNotFoundError for a file that is gone, Fatal for one that cannot be read."""
    try:
        with open(path, "rb", buffering=buffer_bytes) as file:
            return _read(file, mark, max_lines, take_rest, max_line_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Fatal(f"{path} cannot be read: {error.strerror}") from error


def _read(file: BinaryIO, mark: Mark, max_lines: int, take_rest: bool, max_line_bytes: int) -> Lines:
    replaced = not _is_same(file, mark)
    if replaced:
        mark = Mark()
    file.seek(mark.offset)
    lines: list[Line] = []
    offset, row = mark.offset, mark.row
    while row - mark.row < max_lines and offset - mark.offset < MAX_BATCH_BYTES:
        taken = _next_line(file, max_line_bytes, take_rest)
        if taken is None:
            break
        data, length, too_long = taken
        offset, row = offset + length, row + 1
        if row == 1:
            data = data.removeprefix(_BOM)
        if too_long:
            lines.append(Line(row, data, too_long=True))
        elif data := data.strip():
            lines.append(Line(row, data))
    return Lines(lines, Mark(offset, row, *_head(file, mark, offset)), replaced)


def _next_line(file: BinaryIO, limit: int, take_rest: bool) -> tuple[bytes, int, bool] | None:
    """(the line, its length with newline, whether it is longer than `limit` bytes, of which only those are read), or
    None when there is none yet."""
    data = kept = file.readline(limit + 1)
    length, complete = len(data), data.endswith(b"\n")
    too_long = length > limit and not complete
    if too_long:
        kept = data[:KEPT_BYTES]
        while not complete and (data := file.readline(limit)):
            length, complete = length + len(data), data.endswith(b"\n")
    return (kept, length, too_long) if complete or (take_rest and length) else None


def _is_same(file: BinaryIO, mark: Mark) -> bool:
    """Whether the file is the one that was read, as far as it was read."""
    if not mark.offset:
        return True
    if os.fstat(file.fileno()).st_size < mark.offset:
        return False
    return blake2b(file.read(mark.head_bytes), digest_size=16).digest() == mark.head


def _head(file: BinaryIO, mark: Mark, offset: int) -> tuple[bytes, int]:
    size = min(offset, HEAD_BYTES)
    if size == mark.head_bytes:
        return mark.head, size
    file.seek(0)
    return blake2b(file.read(size), digest_size=16).digest(), size
