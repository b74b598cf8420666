"""Datasets of the Hugging Face Hub as sources: hf://owner/name?config=...&split=...&revision=...

They are downloaded (or found in the cache) by `datasets` once a process, and read from its memory-mapped tables, so
that memory does not depend on their size. Without a split all of them are read, each as a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from services.ingest.lines import MAX_BATCH_BYTES, Line, Lines, Mark
from services.ingest.stored import table_line
from services.kernel.errors import Fatal, Retry
from services.kernel.masking import masked

_URL = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:\?(.*))?")
_KEYS = ("config", "split", "revision")
_ROWS_AT_ONCE = 256


class Split(NamedTuple):
    """A split of a dataset, loaded: its URL and its table."""

    url: str
    table: Any

    @property
    def version(self) -> str:
        """Another one when it is another dataset."""
        return str(self.table._fingerprint)

    @property
    def size(self) -> int:
        """Bytes of the table."""
        return int(self.table.data.nbytes)


def is_url(pattern: str) -> bool:
    """Whether a pattern is about the Hub."""
    return pattern.startswith("hf://")


def check(pattern: str, roots: Sequence[str]) -> None:
    """Raises ValueError for what names no dataset, or leaves the roots (where hf:// or hf://owner/ may stand)."""
    match = _URL.fullmatch(pattern)
    if not match or not _query(match[2]).keys() <= set(_KEYS):
        raise ValueError(
            f"files: {masked(pattern)!r} is no hf://owner/name, with ?config=...&split=...&revision=... as needed"
        )
    if roots and not any(is_url(root) and pattern.startswith(root) for root in roots):
        raise ValueError(f"files: {pattern!r} leaves TOKENHAUL_INGEST_ROOTS, {', '.join(roots)}")


def find(pattern: str) -> Iterator[Split]:
    """Its splits, in their order. Takes as long as a download. Raises Retry when the Hub does not answer, Fatal when
    there is no such dataset."""
    match = _URL.fullmatch(pattern)
    assert match, pattern
    name, query = match[1], _query(match[2])
    for split, table in _load(name, **query).items():
        yield Split(f"hf://{name}?{urlencode(query | {'split': split})}", table)


class Rows:
    """A split as an input: a place in it is a number of rows."""

    def __init__(self, split: Split) -> None:
        self._table, self._size = split.table.with_format("arrow"), split.size
        self._known = blake2b(split.version.encode(), digest_size=16).digest()
        self.rows: int = len(split.table)

    def is_same(self, mark: Mark) -> bool:
        """Whether `mark` was made in this dataset."""
        return mark.head == self._known

    def read(self, mark: Mark, *, max_lines: int, take_rest: bool = False) -> Lines:
        """Up to `max_lines` rows behind `mark`."""
        replaced = bool(mark.head) and not self.is_same(mark)
        if replaced:
            mark = Mark()
        lines: list[Line] = []
        size, row = 0, mark.row
        while len(lines) < max_lines and size < MAX_BATCH_BYTES and row < self.rows:
            end = min(self.rows, row + min(_ROWS_AT_ONCE, max_lines - len(lines)))
            for record in self._table[row:end].to_pylist():
                row += 1
                lines.append(table_line(row, record))
                size += len(lines[-1].data)
        offset = self._size * row // max(1, self.rows)
        new = Mark(offset, row, self._known, self.rows, records=mark.records, complete=row == self.rows)
        return Lines(lines, new, replaced)

    def close(self) -> None:
        """The table is mapped, nothing else is open."""


def _query(text: str | None) -> dict[str, str]:
    return dict(parse_qsl(text or ""))


@cache
def _load(
    name: str, config: str | None = None, split: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """{split: table}."""
    try:
        import datasets
    except ImportError as error:
        raise Fatal(f"hf://{name} needs the package datasets: pip install 'tokenhaul[hf]'") from error
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, config, split=split, revision=revision)
    except ConnectionError as error:
        raise Retry("hub", f"hf://{name}: {error}") from error
    except Exception as error:  # a dataset that is not there or not readable raises nearly anything
        raise Fatal(f"hf://{name} cannot be loaded: {type(error).__name__}: {error}") from error
    return {split: loaded} if split else dict(loaded)
