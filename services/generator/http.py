"""HTTP to engines: one aiohttp session, whole answers, and two kinds of trouble that must not be confused."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

import aiohttp
import msgspec

from services.kernel.settings import Secret

_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 4.0
"""SGLang closes what was idle for five seconds: a request on such a connection would look like an engine's death."""

MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Of a million tokens with their log probabilities there are about 64 MiB."""


class HttpError(Exception):
    """No answer."""


class NoConnection(HttpError):
    """None could be made: nothing was sent."""


class Broken(HttpError):
    """It broke after the request was, or may have been, sent."""


class Response(msgspec.Struct, frozen=True):
    """An answer of any status, read to its end."""

    status: int
    content: bytes
    headers: Mapping[str, str] = {}

    @property
    def text(self) -> str:
        """The body, for people."""
        return self.content.decode(errors="replace")


class Http(Protocol):
    """What is asked of a client. Both raise HttpError; deadlines are the caller's."""

    async def get(self, url: str) -> Response: ...

    async def post(self, url: str, body: bytes) -> Response:
        """`body` is JSON."""


class HttpClient:
    """One client for all engines; use it as an async context manager. `trust` says whose certificates count (None: the
    usual ones), `api_key` is sent with every request."""

    def __init__(self, trust: ssl.SSLContext | None = None, api_key: Secret | None = None) -> None:
        self._trust = trust
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key.reveal()}"

    async def __aenter__(self) -> HttpClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS, ssl=self._trust or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # nobody is asked to compress: what is compressed all the same may be a bomb
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, url: str) -> Response:
        """GET."""
        return await self._ask("GET", url, None)

    async def post(self, url: str, body: bytes) -> Response:
        """POST JSON."""
        return await self._ask("POST", url, body)

    async def _ask(self, method: str, url: str, body: bytes | None) -> Response:
        try:
            async with self._session.request(method, url, data=body, allow_redirects=False) as response:
                return Response(response.status, await _read(response), response.headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NoConnection(f"no connection to {url}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Broken(f"{url} closed the connection: {error!r}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body. Raises Broken for one without end."""
    if response.content_length is not None and response.content_length <= MAX_ANSWER_BYTES:
        return await response.read()
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise Broken(f"{response.url} answered more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
