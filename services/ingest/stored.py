"""Files that are written once and then read: compressed lines, JSON arrays, Parquet.

A place in them is a number of rows: after a restart the rows before it are passed over. They are known by their size
and the hashes of both ends; one that changes is another file and read from its start.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, BinaryIO, Literal, cast

import ijson
import msgspec
import pyarrow as pa
import zstandard

from services.ingest.lines import (
    HEAD_BYTES,
    MAX_BATCH_BYTES,
    MAX_LINE_BYTES,
    Line,
    Lines,
    Mark,
    as_line,
    next_line,
    size_of,
)
from services.ingest.tables import Table
from services.ingest.unpack import unpacked

Shape = Literal["jsonl", "json", "parquet"]
Packing = Literal["", "gz", "zst"]
_MAX_DEPTH = 200
_PIECE = 1024 * 1024
_UNPACKED_BYTES = 256 * 1024 * 1024  # that any packed Parquet file may have on disk; a larger one ...
_MOST_PACKED = 100  # ... so many times its size: it is packed inside already
_encode = msgspec.json.Encoder(decimal_format="number", enc_hook=str).encode


class Broken(Exception):
    """The file cannot be read to its end: half written, cut off, or not what its name says."""


_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    zstandard.ZstdError,
    ijson.JSONError,
    pa.ArrowException,
    RecursionError,
)


def _broken(error: Exception) -> Broken:
    """Raises `error` itself when the file system raised it; Arrow and gzip call damage an OSError as well."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    return Broken(str(error) or type(error).__name__)


class Stored:
    """One such file. It stays open between two reads, as long as they follow each other.

    Not for use by two threads at once. `rows`: how many it holds, when it says so."""

    def __init__(self, open: Callable[[], BinaryIO], shape: Shape, packing: Packing) -> None:
        self._open, self._shape, self._packing = open, shape, packing
        self._file: BinaryIO | None = None
        self._lines: Iterator[Line] = iter(())
        self._row, self._size = -1, 0
        self._known: tuple[bytes, int] = (b"", 0)
        self._failure: Broken | None = None
        self.rows: int | None = None

    def is_same(self, mark: Mark) -> bool:
        """Whether this is the file that `mark` was made in."""
        with self._open() as file:
            return _fingerprint(file) == (mark.head, mark.head_bytes)

    def read(self, mark: Mark, *, max_lines: int, take_rest: bool = False) -> Lines:
        """Up to `max_lines` rows behind `mark`. Raises OSError, and Broken when the rows before that are read."""
        replaced = False
        if self._file is None or self._row != mark.row:
            mark, replaced = self._begin(mark)
        lines: list[Line] = []
        size, ended = 0, mark.complete
        while not ended and not self._failure and len(lines) < max_lines and size < MAX_BATCH_BYTES:
            try:
                line = next(self._lines, None)
            except _ERRORS as error:
                self._failure = _broken(error)
                break
            if line is None:
                ended = True
                break
            lines.append(line)
            size, self._row = size + len(line.data), line.row
        if self._failure and not lines:
            failure = self._failure
            self.close()
            raise failure
        offset = self._size if ended else max(mark.offset, min(self._file.tell(), self._size) if self._file else 0)
        new = Mark(offset, max(mark.row, self._row), *self._known, b"", 0, mark.inode, mark.records, ended)
        if ended:
            self.close()
        return Lines(lines, new, replaced)

    def close(self) -> None:
        """Let go of the file; the next read opens it again."""
        file, self._file, self._lines, self._failure = self._file, None, iter(()), None
        if file is not None:
            file.close()

    def _begin(self, mark: Mark) -> tuple[Mark, bool]:
        """Open the file behind `mark`; (mark, whether it is another file, which is then read from its start)."""
        self.close()
        self._file = file = self._open()
        self._known, self._size = _fingerprint(file), size_of(file)
        replaced = bool(mark.head_bytes) and self._known != (mark.head, mark.head_bytes)
        if replaced:
            mark = Mark()
        self._row = mark.row
        file.seek(0)
        try:
            self._lines = self._rows(file, mark.row)
        except _ERRORS as error:
            self._failure = _broken(error)
        return mark, replaced

    def _rows(self, file: BinaryIO, start: int) -> Iterator[Line]:
        content = unpacked(file, self._packing)
        if self._shape == "parquet":
            return self._parquet(content, start)
        if self._shape == "jsonl":
            return _lines(content, start)
        begin = content.peek(64).lstrip()[:1]  # type: ignore[attr-defined]  # all of unpack's are buffered
        if begin not in (b"[", b"{", b""):
            raise ValueError("neither an array nor lines of JSON")
        return _lines(content, start) if begin == b"{" else _array(content, start)

    def _parquet(self, content: BinaryIO, start: int) -> Iterator[Line]:
        with tempfile.TemporaryFile() as whole:
            if self._packing:  # it is read from its end
                most = max(_UNPACKED_BYTES, _MOST_PACKED * self._size)
                while piece := content.read(_PIECE):
                    whole.write(piece)
                    if whole.tell() > most:
                        raise ValueError(f"it is a bomb: {self._size} bytes of it stand for more than {most}")
            table = Table(cast(BinaryIO, whole) if self._packing else content)
            self.rows = table.rows
            for number, record in table.read(start):
                yield table_line(number, record) if record is not None else Line(number, b"", too_long=True)


def record_line(row: int, record: object) -> Line:
    """A record that is no text yet, as a line. What JSON has not (dates, decimals, bytes) becomes text or a number."""
    data = _encode(record)
    return Line(row, data[: MAX_LINE_BYTES + 1], too_long=len(data) > MAX_LINE_BYTES)


def table_line(row: int, record: dict[str, object]) -> Line:
    """A row of an Arrow table, as a line. A struct has all keys that any row gave it, null where this row had none: a
    template would print the parameters of other rows' tools. So what is null inside of a column is not there."""
    return record_line(row, {column: _without_nulls(value) for column, value in record.items()})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value[:1] + value[-1:]):
        return [_without_nulls(each) for each in value]
    return value


def _lines(content: BinaryIO, start: int) -> Iterator[Line]:
    row = 0
    while taken := next_line(content, MAX_LINE_BYTES, take_rest=True):
        row += 1
        if row > start and (line := as_line(row, taken[0], taken[2])):
            yield line


def _array(content: BinaryIO, start: int) -> Iterator[Line]:
    """Event by event: ijson's own way to items keeps the path to every list in a list, which takes memory in the square
    of their depth."""
    row = depth = 0
    builder = ijson.ObjectBuilder()
    for event, value in ijson.basic_parse(content, use_float=True):
        if event in ("end_map", "end_array"):
            depth -= 1
            if depth == 0:
                continue
        if depth:
            builder.event(event, value)
        if event in ("start_map", "start_array"):
            depth += 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"row {row + 1} has more than {_MAX_DEPTH} lists or objects in one another")
        elif depth == 1:
            row += 1
            if row > start:
                yield record_line(row, builder.value)
            builder = ijson.ObjectBuilder()


def _fingerprint(file: BinaryIO) -> tuple[bytes, int]:
    size = size_of(file)
    file.seek(0)
    total = blake2b(file.read(HEAD_BYTES), digest_size=16)
    file.seek(max(0, size - HEAD_BYTES))
    total.update(file.read(HEAD_BYTES))
    return total.digest(), size
