"""Objects of a store as files of a source: s3://bucket/prefix, and gs:// and az:// in the same way.

`*` and `?` stand for anything within a folder, `**` for anything; a prefix without them is a folder or one object.
Credentials and endpoint come from the environment: see services.kernel.objects.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import BinaryIO, cast

from services.kernel.masking import masked
from services.kernel.objects import Found, ObjectStore, open_store

_URL = re.compile(r"((?:s3|gs|az)://[^/@:?#\s*]+)/?(.*)", re.DOTALL)
_WILD = re.compile(r"(\*\*/|\*\*|\*|\?)")
_AS_REGEX = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_BUFFER = 4 * 1024 * 1024


def is_url(pattern: str) -> bool:
    """Whether a pattern is about a store at all."""
    return "://" in pattern


def check(pattern: str, roots: Sequence[str]) -> None:
    """Raises ValueError for a pattern of no store that is known, or that leaves the roots."""
    if not _URL.fullmatch(pattern):
        raise ValueError(f"files: {masked(pattern)!r} is no s3://bucket/prefix (nor gs://, az://, hf://)")
    fixed = _WILD.split(pattern)[0]
    if roots and not any(fixed == root.rstrip("/") or fixed.startswith(root.rstrip("/") + "/") for root in roots):
        raise ValueError(f"files: {pattern!r} leaves TOKENHAUL_INGEST_ROOTS, {', '.join(roots)}")


def find(pattern: str) -> Iterator[tuple[str, Found]]:
    """(URL, object) of all that match now, in the order of their keys. Raises Retry for a store that does not answer,
    Fatal for one that cannot be used."""
    bucket, key = _parts(pattern)
    store, wanted = _store(bucket), _regex(key)
    if _WILD.search(key):
        there = list(store.walk(_WILD.split(key)[0].rpartition("/")[0]))
    else:
        folder = key.rstrip("/")
        there = list(store.walk(folder))
        if not there and folder and (found_alone := store.look(folder)):  # no folder, but one object
            there = [found_alone]
    for found in sorted(there):
        if wanted.fullmatch(found.key) and not any(part.startswith(".") for part in found.key.split("/")):
            yield f"{bucket}/{found.key}", found


def open_object(url: str, found: Found) -> BinaryIO:
    """The object as it was found."""
    raw = _store(_parts(url)[0]).read(found)
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER))


def _parts(url: str) -> tuple[str, str]:
    match = _URL.fullmatch(url)
    assert match, url
    return match[1], match[2]


@cache
def _store(bucket: str) -> ObjectStore:
    return cast(ObjectStore, open_store(bucket))


def _regex(key: str) -> re.Pattern[str]:
    """What keys match: those of a folder, when there is nothing wild in it."""
    if not _WILD.search(key):
        folder = re.escape(key.rstrip("/"))
        return re.compile(f"{folder}(?:/.*)?" if folder else ".*", re.DOTALL)
    return re.compile("".join(_AS_REGEX.get(part, re.escape(part)) for part in _WILD.split(key)), re.DOTALL)
