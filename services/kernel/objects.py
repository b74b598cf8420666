"""Object stores: S3 and what speaks like it, through obstore; Google Cloud Storage and Azure by the same way (their
servers are not in our tests).

Credentials, region and endpoint come from the environment alone, under the names of each cloud's own tools:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL (or a role of the pod);
GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from services.kernel import failpoints
from services.kernel.errors import Fatal, Refused, Retry
from services.kernel.masking import masked
from services.kernel.store import Data, LocalStore, Store

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

_URL = re.compile(r"(s3|gs|az)://[^/@:?#\s]+(/[^?#\s]*)?")
_CONNECT, _REQUEST = timedelta(seconds=5), timedelta(minutes=5)  # 256 MiB at 1 MiB/s; nothing waits for ever
_RETRIES: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
_CREDENTIALS = "credentials have variables of their own, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the like"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")

_Client = S3Store | GCSStore | AzureStore


def open_store(root: str) -> Store:
    """The store at `root`: a directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix. Nothing
    connects yet. Raises Fatal for what is none of these, or when the environment's configuration is refused."""
    if "://" not in root:
        return LocalStore(Path(root))
    if not (match := _URL.fullmatch(root)):
        raise Fatal(
            f"{masked(root)!r} is neither a directory nor s3://bucket/prefix, gs://bucket/prefix or "
            f"az://container/prefix ({_CREDENTIALS})"
        )
    for name in _ENDPOINTS:
        if (endpoint := os.environ.get(name, "")) != masked(endpoint):
            raise Fatal(f"{name}={masked(endpoint)!r} has a user or a password in it: {_CREDENTIALS}")
    # Whoever names an endpoint with http:// means it; the clients ask to be told twice.
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    options: ClientConfig = {"connect_timeout": _CONNECT, "timeout": _REQUEST, "allow_http": plain}
    url = root.rstrip("/")
    try:
        client: _Client
        if match[1] == "s3":
            client = S3Store.from_url(url, client_options=options, retry_config=_RETRIES)
        elif match[1] == "gs":
            client = GCSStore.from_url(url, client_options=options, retry_config=_RETRIES)
        else:
            client = AzureStore.from_url(url, client_options=options, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        raise Fatal(f"{url} cannot be used: {_first_line(error)}") from error
    return ObjectStore(client, url)


class Replaced(OSError):
    """An object is not the one any more that is being read."""


class ObjectStore:
    """A prefix of a bucket. An object is put in one request that the server refuses when the key exists.

    What a request that failed has done is not known, and the refusal of a key may be about our own request sent
    twice (or about two at once, with no winner yet): then the object is read and compared. Contents are unique to
    their writer, so equal bytes are ours."""

    def __init__(self, client: _Client, url: str) -> None:
        self._client, self._url = client, url

    def create(self, key: str, data: Data) -> bool:
        failure: BaseError | OSError | None = None
        try:
            failpoints.passing("create.before")
            result = obstore.put(self._client, key, data, mode="create", use_multipart=False)
            failpoints.passing("create.put")
        except (BaseError, OSError) as error:
            failure = error
        with _retried(self.name(key), failure):
            try:
                there = obstore.head(self._client, key)
                # Not every 200 is one: some servers put an error into its body. Only what can be seen was created.
                if failure is None and (there["size"], there["e_tag"]) == (len(data), result["e_tag"]):
                    return True
                return there["size"] == len(data) and bytes(obstore.get(self._client, key).bytes()) == data
            except FileNotFoundError as error:
                what = "it was taken, but is not there" if failure is None else _first_line(failure)
                raise _kind(failure)("store", f"{self.name(key)}: {what}") from (failure or error)

    def open(self, key: str) -> BinaryIO:
        with _retried(self.name(key)):
            return cast(BinaryIO, _Object(self._client, key, self.name(key), obstore.head(self._client, key)["size"]))

    def list(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        with _retried(self.name(folder)):
            found = obstore.list_with_delimiter(self._client, prefix or None)
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(path.removeprefix(prefix).rstrip("/") for path in paths)

    def walk(self, folder: str) -> Iterator[Found]:
        """Every object in `folder` ("": the root) and the folders in it."""
        with _retried(self.name(folder)):
            for page in obstore.list(self._client, folder or None):
                yield from map(_found, page)

    def look(self, key: str) -> Found | None:
        """One object; None: there is none."""
        with _retried(self.name(key)):
            try:
                each = obstore.head(self._client, key)
            except FileNotFoundError:
                return None
            return _found(each)

    def read(self, found: Found) -> BinaryIO:
        """That object as it was found. Reading raises OSError when another one was put in its place."""
        name = self.name(found.key)
        return cast(BinaryIO, _Object(self._client, found.key, name, found.size, found.e_tag))

    def delete(self, key: str) -> None:
        with _retried(self.name(key)):
            obstore.delete(self._client, key)

    def sweep(self) -> None:
        """A put that ended early has left nothing."""

    def name(self, key: str) -> str:
        return f"{self._url}/{key}"


class Found(NamedTuple):
    """An object by its key below the root; `version` is another one when it is another object."""

    key: str
    size: int
    version: str
    e_tag: str | None


def _found(meta: ObjectMeta) -> Found:
    return Found(meta["path"], meta["size"], meta["e_tag"] or meta["last_modified"].isoformat(), meta["e_tag"])


class _Object(io.RawIOBase):
    """Reads ranges of an object, of one version of it if `e_tag` is given; each read is a request. Raises Retry when
    there is no answer."""

    def __init__(self, client: _Client, key: str, name: str, size: int, e_tag: str | None = None) -> None:
        super().__init__()
        self._options: GetOptions = {} if e_tag is None else {"if_match": e_tag}
        self._client, self._key, self._name, self._size = client, key, name, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        with _retried(self._name):
            data = self._get(length)
        self._position += len(data)
        return data

    def _get(self, length: int) -> bytes:
        span = (self._position, self._position + length)
        try:
            return bytes(obstore.get(self._client, self._key, options={**self._options, "range": span}).bytes())
        except PreconditionError as error:
            raise Replaced(f"{self._name} was replaced while it was read") from error

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stubs know no common type
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _retried(name: str, before: BaseException | None = None) -> Iterator[None]:
    """What the store refuses now (away, overloaded, not permitted) it may allow later. `before`: what failed first, and
    tells whether it is a refusal (who must not list is not permitted to see that nothing is there)."""
    try:
        yield
    except Replaced:
        raise
    except (BaseError, OSError) as error:
        raise _kind(before or error)("store", f"{name}: {_first_line(error)}") from error


def _kind(error: BaseException | None) -> type[Retry]:
    return Refused if isinstance(error, (PermissionDeniedError, UnauthenticatedError, FileNotFoundError)) else Retry


def _first_line(error: BaseException) -> str:
    """Below it, obstore shows what the error is made of."""
    return str(error).strip().split("\n", 1)[0]
