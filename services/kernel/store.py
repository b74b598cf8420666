"""Where what is written once is kept: files, or objects (objects.py), that are created and never changed.

Writers rely on one thing: of two that create the same key, exactly one succeeds.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from services.kernel import failpoints
from services.kernel.errors import Fatal, Refused, Retry

Data = bytes | memoryview
_TEMPORARY = ".tmp"
_STALE_SECONDS = 24 * 3600.0
_REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


class Store(Protocol):
    """Keys are paths with `/`. All calls block; they raise Retry for what may pass, or may have worked;
    Refused, a kind of it, where the store said no."""

    def create(self, key: str, data: Data) -> bool:
        """Make `key` hold `data`, durably. False: it exists already, and stays as it is."""

    def open(self, key: str) -> BinaryIO:
        """Read the object at `key`, at any position; seeking to the end tells its size."""

    def list(self, folder: str) -> list[str]:
        """The names right under `folder` ("" is the root), sorted; empty when there is none."""

    def delete(self, key: str) -> None:
        """Remove what `prove` made. Nothing else is ever removed."""

    def sweep(self) -> None:
        """Remove what writers that crashed long ago left unfinished."""

    def name(self, key: str) -> str:
        """The full name of `key`, for people."""


def prove(store: Store) -> None:
    """Raise Fatal for a store in which the same key can be created twice: chains would break in it unnoticed."""
    key = f"{_TEMPORARY}/probe-{uuid.uuid4().hex}"
    try:
        first, second = store.create(key, b"1"), store.create(key, b"2")
    finally:
        with suppress(Retry):  # who may only create leaves a few bytes behind
            store.delete(key)
    if not first or second:
        raise Fatal(f"{store.name('')} cannot hold a dataset: it lets the same file be created twice")


class LocalStore:
    """A directory. A file is written under another name, made durable, then linked: link(2) fails if the name exists
    (rename would overwrite it)."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, key: str, data: Data) -> bool:
        path, temporary = self._root / key, self._root / _TEMPORARY / uuid.uuid4().hex
        with _retried(path):
            failpoints.passing("create.before")
            self._make_folder(path.parent)
            self._make_folder(temporary.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                failpoints.passing("create.written")
                with suppress(FileExistsError):
                    os.link(temporary, path)
                failpoints.passing("create.linked")
                # NFS may create the link, lose the answer and report the repeated request as taken: count the names.
                created = temporary.stat().st_nlink > 1
            finally:
                temporary.unlink(missing_ok=True)
            if created:
                _sync_folder(path.parent)
            failpoints.passing("create.after")
            return created

    def open(self, key: str) -> BinaryIO:
        path = self._root / key
        with _retried(path):
            return path.open("rb")

    def list(self, folder: str) -> list[str]:
        path = self._root / folder
        with _retried(path), suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(path))
        return []

    def delete(self, key: str) -> None:
        path = self._root / key
        with _retried(path):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        folder = self._root / _TEMPORARY
        for name in self.list(_TEMPORARY):
            with _retried(folder / name), suppress(FileNotFoundError):
                if time.time() - (folder / name).stat().st_mtime > _STALE_SECONDS:
                    (folder / name).unlink()

    def name(self, key: str) -> str:
        return str(self._root / key)

    def _make_folder(self, path: Path) -> None:
        if not path.is_dir():
            self._make_folder(path.parent)
            path.mkdir(exist_ok=True)
            _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Make the names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _retried(path: Path) -> Iterator[None]:
    """What the file system refuses now (full, away, not permitted) it may allow later."""
    try:
        yield
    except OSError as error:
        kind = Refused if error.errno in _REFUSED else Retry
        raise kind("store", f"{path}: {error.strerror or error}") from error
