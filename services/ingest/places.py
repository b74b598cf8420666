"""Where a source's files are: patterns and folders, looked up anew whenever somebody asks."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import msgspec

from services.ingest import buckets, hub
from services.ingest.lines import Growing, Lines, Mark, Whole
from services.ingest.stored import Packing, Shape, Stored
from services.kernel.objects import Found as ObjectFound

KINDS = ".jsonl, .json or .parquet, each also with .gz or .zst behind it"
_KIND = re.compile(r"\.(jsonl|json|parquet)(?:\.(gz|zst))?$")
_BUFFER = 1024 * 1024


class Input(Protocol):
    """Something that holds records in an order: a file, an object, a part of a dataset."""

    @property
    def rows(self) -> int | None:
        """How many records it holds, where that is known."""

    def is_same(self, mark: Mark) -> bool:
        """Whether `mark` was made in it."""

    def read(self, mark: Mark, *, max_lines: int, take_rest: bool = False) -> Lines:
        """The records behind `mark`, at most `max_lines`."""

    def close(self) -> None:
        """Let go of what is open; the next read opens it again."""


class Entry(msgspec.Struct, frozen=True):
    """An input as it was found. While `version` stays, what it holds stays. `size` in bytes. `modified` is when it was
    written last (Unix time), of a file that is to be read when nobody writes it any more."""

    version: Hashable
    size: int
    make: Callable[[], Input]
    inode: int = 0
    modified: float | None = None


class Found(msgspec.Struct, frozen=True):
    """The inputs of a source by name (as its pattern spells it), and names that are passed over, with the reason."""

    entries: dict[str, Entry]
    passed_over: dict[str, str]


def check(patterns: Sequence[str], folder: Path, roots: Sequence[str]) -> None:
    """Raises ValueError for a pattern that can never find anything, or that leaves the roots."""
    for pattern in patterns:
        if buckets.is_url(pattern):
            (hub if hub.is_url(pattern) else buckets).check(pattern, roots)
            continue
        path = folder / pattern
        if not _within(_fixed(path), roots):
            raise ValueError(f"files: {pattern!r} leaves TOKENHAUL_INGEST_ROOTS, {', '.join(roots)}")
        if path.is_dir():
            continue
        if not _KIND.search(pattern):
            raise ValueError(f"files: {pattern!r} is no folder and does not end in {KINDS}, the kinds that are read")
        if not glob.has_magic(pattern) and not path.exists():
            raise ValueError(f"files: there is no {path}")


def find(patterns: Sequence[str], folder: Path, roots: Sequence[str]) -> Found:
    """Look for the files now; each once, in the order of the patterns, sorted within one. Raises Retry for a store
    that does not answer."""
    entries: dict[str, Entry] = {}
    passed_over: dict[str, str] = {}
    known: set[Path] = set()
    for pattern in patterns:
        if hub.is_url(pattern):
            for split in hub.find(pattern):
                entries.setdefault(split.url, Entry(split.version, split.size, partial(hub.Rows, split)))
            continue
        if buckets.is_url(pattern):
            for url, found in buckets.find(pattern):
                if kind_of(url):
                    entries.setdefault(url, _object_entry(url, found))
                else:
                    passed_over[url] = f"it does not end in {KINDS}"
            continue
        for name in _names(pattern, folder):
            path = folder / name
            if reason := _refused(name, path, roots):
                passed_over[name] = reason
            elif path not in known and (entry := _entry(path)):
                entries[name] = entry
                known.add(path)
    return Found(entries, passed_over)


def kind_of(name: str) -> tuple[Shape, Packing] | None:
    """What a file of this name holds, and how it is packed; None: it is not read."""
    match = _KIND.search(name)
    return (cast(Shape, match[1]), cast(Packing, match[2] or "")) if match else None


def input_of(name: str, open: Callable[[], BinaryIO]) -> Input:
    """The reader of a file of this name."""
    shape, packing = kind_of(name) or ("jsonl", "")
    return Growing(open) if (shape, packing) == ("jsonl", "") else Stored(open, shape, packing)


def file_input(path: Path) -> Input:
    """The reader of a local file."""
    return input_of(path.name, cast(Callable[[], BinaryIO], partial(open, path, "rb", buffering=_BUFFER)))


def _names(pattern: str, folder: Path) -> list[str]:
    if (folder / pattern).is_file():
        return [pattern]
    if (folder / pattern).is_dir():
        inside = sorted(glob.glob("**/*", root_dir=folder / pattern, recursive=True))
        return [str(Path(pattern) / name) for name in inside if not (folder / pattern / name).is_dir()]
    return sorted(glob.glob(pattern, root_dir=folder, recursive=True))


def _refused(name: str, path: Path, roots: Sequence[str]) -> str:
    if any("\ud800" <= character <= "\udfff" for character in name):
        return "its name could be written to no topic"
    if not kind_of(name):
        return f"it does not end in {KINDS}"
    return "" if _within(path, roots) else "it leaves TOKENHAUL_INGEST_ROOTS"


def _entry(path: Path) -> Entry | None:
    try:
        stat = path.stat()
    except OSError:
        return None  # gone since it was listed, or a link to nowhere
    version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    modified = None if path.name.endswith(".jsonl") else stat.st_mtime
    return Entry(version, stat.st_size, partial(file_input, path), stat.st_ino, modified)


def _object_entry(url: str, found: ObjectFound) -> Entry:
    opener = partial(buckets.open_object, url, found)
    shape, packing = kind_of(url) or ("jsonl", "")
    if (shape, packing) == ("jsonl", ""):
        return Entry((found.size, found.version), found.size, partial(Whole, opener, found.size))
    return Entry((found.size, found.version), found.size, partial(Stored, opener, shape, packing))


def _within(path: Path, roots: Sequence[str]) -> bool:
    """Whether the path, links followed, is in one of the roots. No roots: anywhere."""
    if not roots:
        return True
    real = path.resolve()
    return any(real.is_relative_to(Path(root).resolve()) for root in roots if not buckets.is_url(root))


def _fixed(path: Path) -> Path:
    """The part of a pattern before its first wildcard."""
    parts = path.parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part) or part == "**"), len(parts))
    return path if path.exists() else Path(*parts[:first])
