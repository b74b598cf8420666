"""POST /v1/prompts?source=NAME: lines of JSON come in as a stream, and are answered line by line when they are safe.

A request may be sent again at any time: what was published is then `repeated`, nothing is asked twice.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.ingest.intake import Intake, LimitReached, Result
from services.ingest.lines import KEPT_BYTES, MAX_BATCH_BYTES, MAX_LINE_BYTES
from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal, Retry

MAX_LINES = 100_000
_SILENCE_SECONDS = 60.0
_RETRY_SECONDS = 5
_LENGTH = re.compile("[0-9]{1,18}")  # int() would take more: signs, underscores, thousands of digits not
_BOM = b"\xef\xbb\xbf"
_encode = msgspec.json.Encoder().encode
_Record = tuple[int, bytes, bool]


class _TooMuch(Exception):
    """The request is larger than what is taken in one."""


class PromptsApi:
    """The ASGI application. `full`: the generators have enough to do."""

    def __init__(self, settings: IngestSettings, intake: Intake, full: Callable[[], bool]) -> None:
        self._intake, self._full = intake, full
        self._token, self._most = settings.http_token.reveal().encode(), settings.http_max_body_bytes
        self._records = settings.batch_records
        self.app = Starlette(routes=[Route("/v1/prompts", self._prompts, methods=["POST"])])

    async def _prompts(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        source, results = request.query_params["source"], list[Result]()
        try:
            async for records in self._chunks(request, self._intake.sources[source].samples):
                while records:
                    done = await self._intake.push(source, records)
                    results += done
                    records = records[len(done) :]
        except _TooMuch as error:
            return _error(413, f"{error}; {len(results)} lines of it are done", len(results))
        except LimitReached as error:
            return _error(409, str(error), len(results))
        except Retry as error:
            return _later(503, str(error), len(results))
        except TimeoutError:
            return _error(408, f"nothing came for {_SILENCE_SECONDS:g} s", len(results))
        except ClientDisconnect:
            return Response(status_code=400)
        body = b"".join(_encode(result) + b"\n" for result in results)
        return Response(body, media_type="application/x-ndjson")

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that is not even read."""
        given = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
            return JSONResponse({"error": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})
        if self._intake.closed:
            return _later(503, self._intake.closed)
        names = ", ".join(sorted(self._intake.sources)) or "none"
        if request.query_params.get("source") not in self._intake.sources:
            return _error(404, f"?source=NAME must name a source declared with `http: true`; there are: {names}")
        if request.headers.get("content-encoding", "identity") != "identity":
            return _error(415, "the body must not be compressed")
        length = request.headers.get("content-length", "0")
        if not _LENGTH.fullmatch(length):
            return _error(400, "content-length must be the number of the body's bytes")
        if int(length) > self._most:
            return _error(413, f"a body may have {self._most} bytes: send less at once")
        if self._full():
            return _later(429, "the generators have enough to do for now")
        return None

    async def _chunks(self, request: Request, samples: int) -> AsyncIterator[list[_Record]]:
        """The lines of the body that are not blank, as many as go into one batch: it is counted in prompts."""
        most = max(1, self._records // samples)
        records: list[_Record] = []
        size = 0
        async for number, data, too_long in self._lines(request):
            if data := data if too_long else data.strip():
                records.append((number, data, too_long))
                size += len(data)
            if len(records) >= most or size >= MAX_BATCH_BYTES:
                yield records
                records, size = [], 0
        if records:
            yield records

    async def _lines(self, request: Request) -> AsyncIterator[_Record]:
        """(line number, line, whether it is too long, of which only the beginning is kept)."""
        buffer, dropped, total, number = bytearray(), 0, 0, 0
        stream = request.stream()
        while True:
            async with asyncio.timeout(_SILENCE_SECONDS):
                chunk = await anext(stream, None)
            if chunk is None:
                break
            total += len(chunk)
            if total > self._most or number > MAX_LINES:
                raise _TooMuch(f"a body may have {self._most} bytes and {MAX_LINES} lines: send less at once")
            *ended, rest = chunk.split(b"\n")
            for piece in ended:
                number += 1
                buffer += piece
                yield _line(number, buffer, dropped)
                buffer, dropped = bytearray(), 0
            buffer += rest
            if len(buffer) > MAX_LINE_BYTES:
                dropped += len(buffer) - KEPT_BYTES
                del buffer[KEPT_BYTES:]
        if buffer:
            yield _line(number + 1, buffer, dropped)


@asynccontextmanager
async def served(app: Starlette, settings: IngestSettings) -> AsyncIterator[None]:
    """Answer requests while inside. Raises Fatal when the port is taken."""
    try:
        listener = socket.create_server((settings.http_host, settings.http_port))
    except OSError as error:
        address = f"TOKENHAUL_INGEST_HTTP_HOST:PORT {settings.http_host}:{settings.http_port}"
        raise Fatal(f"cannot listen on {address}: {error.strerror}") from error
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False, server_header=False,
        limit_concurrency=1024, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the lifecycle's affair."""
        yield


def _line(number: int, buffer: bytearray, dropped: int) -> _Record:
    data = bytes(buffer)
    if number == 1:
        data = data.removeprefix(_BOM)
    too_long = len(data) + dropped > MAX_LINE_BYTES
    return number, data[:KEPT_BYTES] if too_long else data, too_long


def _error(status: int, text: str, done: int = 0) -> Response:
    return JSONResponse({"error": text, "lines_done": done}, status)


def _later(status: int, text: str, done: int = 0) -> Response:
    response = _error(status, text, done)
    response.headers["Retry-After"] = str(_RETRY_SECONDS)
    return response
