"""An engine's answers without an engine: a function in place of the generator's HTTP client."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from services.generator.http import NoConnection, Response


class Answering:
    """services.generator.http.Http, answered by a function; httpx.ConnectError from it is one that nobody answers."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self._answer = answer

    async def get(self, url: str) -> Response:
        return self._ask(httpx.Request("GET", url))

    async def post(self, url: str, body: bytes) -> Response:
        return self._ask(httpx.Request("POST", url, content=body))

    def _ask(self, request: httpx.Request) -> Response:
        try:
            response = self._answer(request)
        except httpx.ConnectError as error:
            raise NoConnection(str(error)) from error
        return Response(response.status_code, response.content, response.headers)
