"""What goes wrong between a client and an S3 server: a proxy that answers in the server's place, or not at all."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import obstore
from obstore.store import S3Store

Fault = Literal[
    "500", "503", "429", "409", "403", "reset", "hangs", "error in a 200", "taken, not kept",
    "500 after", "reset after", "hangs after", "overwrites",
]  # fmt: skip
"""A status, or what happens to the connection; `after`: the server has done what it was asked to. `overwrites`: it does
not care whether the object exists."""

_ERROR = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>%s</Code><Message>Please try again.</Message></Error>'
_CODES = {429: b"SlowDown", 409: b"ConditionalRequestConflict", 403: b"AccessDenied", 200: b"InternalError"}


_Answer = tuple[int, dict[str, str], bytes]


class FaultyS3:
    """The next `times` requests of `method` meet the fault; all others reach the server."""

    def __init__(self, port: int, server_port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server_port = server_port
        self._fault: Fault | None = None
        self._method, self._times = "", 0
        self._lock = threading.Lock()
        self.met = 0

    def fail(self, fault: Fault, times: int, method: str = "PUT") -> None:
        """From now on."""
        with self._lock:
            self._fault, self._times, self._method, self.met = fault, times, method, 0

    def recover(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self._times = 0

    def fault(self, method: str) -> Fault | None:
        """What a request meets."""
        with self._lock:
            if method != self._method or not self._times:
                return None
            self._times -= 1
            self.met += 1
            return self._fault

    def overwrite(self, path: str, body: bytes) -> str:
        """Put the object, whatever is there; its ETag. The proxy has the server's key, for requests are signed."""
        bucket, key = path.lstrip("/").split("/", 1)
        server = S3Store(bucket, endpoint=f"http://127.0.0.1:{self._server_port}", client_options={"allow_http": True})
        return str(obstore.put(server, key, body)["e_tag"])

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """What the server says."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=30)
        try:
            # As it came, Host too: it is signed.
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, server_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = FaultyS3(self.server_address[1], server_port)
        self.closing = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_request(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.fault(self.command)
        if fault is None:
            self._answer(*proxy.forward(self.command, self.path, dict(self.headers), body))
            return
        if fault.endswith(" after"):
            proxy.forward(self.command, self.path, dict(self.headers), body)
        if fault == "overwrites":
            self._answer(200, {"ETag": proxy.overwrite(self.path, body)}, b"")
        else:
            self._fail(fault.removesuffix(" after"))

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_request

    def _fail(self, fault: str) -> None:
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault == "hangs":
            self.server.closing.wait(5)
            self.close_connection = True
        elif fault == "taken, not kept":
            self._answer(200, {"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'}, b"")
        else:
            status = 200 if fault == "error in a 200" else int(fault)
            self._answer(status, {"Content-Type": "application/xml"}, _ERROR % _CODES.get(status, b"InternalError"))

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        for name, value in {**headers, "Content-Length": length}.items():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def faulty_s3(server_port: int) -> Iterator[FaultyS3]:
    """A proxy before the S3 server at that port of the loopback address."""
    server = _Server(server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.proxy
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
