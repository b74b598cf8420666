"""What is said to an SGLang server, and what its answers mean for a request: an answer, Retry or Reject.

The transport is aiohttp's under httpx's API: plain httpx costs 10 to 20 ms of CPU a request at 512 in flight.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from schemas.prompts import Prompt
from schemas.sequences import FailureReason
from services.kernel.errors import Fatal, Reject, Retry

_BODY_SHOWN = 500


class FinishReason(msgspec.Struct):
    """Why a generation ended: type is stop, length or abort."""

    type: str
    matched: int | str | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct):
    """Of meta_info, what is checked or kept. A request aborted in the queue has no prompt_tokens."""

    id: str
    finish_reason: FinishReason
    completion_tokens: int
    prompt_tokens: int | None = None
    num_retractions: int = 0
    weight_version: str | None = None


class Answer(msgspec.Struct):
    """The answer of /generate. Old servers and some settings leave output_ids out."""

    meta_info: MetaInfo
    output_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class EngineDown(Retry):
    """No connection could be made: nothing was sent, so nothing is charged to the prompt."""


class EngineBusy(Retry):
    """429 or 503: the engine took nothing on; nothing is charged to the prompt."""


_decode = msgspec.json.Decoder(Answer).decode
_encode = msgspec.json.Encoder().encode


def http_client() -> httpx.AsyncClient:
    """One client for all engines. Deadlines are set per call, as a whole; the pool has no limit of its own."""
    limits = httpx.Limits(max_connections=0, keepalive_expiry=15.0)  # 0: without it aiohttp stops at 100
    return httpx.AsyncClient(transport=AiohttpTransport(limits=limits), timeout=httpx.Timeout(None, connect=10.0))


async def generate(http: httpx.AsyncClient, url: str, prompt: Prompt, rid: str, seconds: float) -> Answer:
    """Ask the engine at `url` exactly what the prompt says. Raises Retry, Reject(FailureReason) or Fatal."""
    sampling = {**prompt.sampling, "sampling_seed": prompt.seed}
    body = _encode({"rid": rid, "input_ids": prompt.prompt_ids, "sampling_params": sampling})
    try:
        async with asyncio.timeout(seconds):
            response = await http.post(f"{url}/generate", content=body, headers={"Content-Type": "application/json"})
    except TimeoutError as error:
        raise Retry("timeout", f"no answer of {url} within {seconds:.0f} s") from error
    except httpx.TransportError as error:
        # httpx-aiohttp names a connection lost half-way like one never made: only the cause tells them apart.
        if isinstance(error.__cause__, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise EngineDown("engine_down", f"no connection to {url}: {error!r}") from error
        raise Retry("connection_lost", f"{url} closed the connection: {error!r}") from error
    if response.status_code != 200:
        raise _refusal(url, response)
    return _answer(url, response.content)


def _answer(url: str, content: bytes) -> Answer:
    try:
        answer = _decode(content)
    except msgspec.ValidationError as error:
        raise Reject(FailureReason.BAD_ANSWER, f"answer of {url} is not one of /generate: {error}") from error
    except msgspec.DecodeError as error:
        raise Retry("not_json", f"answer of {url} is not JSON: {error}") from error
    if answer.meta_info.finish_reason.type == "abort":
        # Status 200, with part of the ids or none: somebody aborted it, it is no data.
        raise Retry("abort", f"{url} aborted the request: {answer.meta_info.finish_reason.message}")
    if answer.output_ids is msgspec.UNSET:
        raise Fatal(
            f"the engine at {url} answers without output_ids, so the exact tokens cannot be had: use SGLang >= 0.5.1, "
            f"or start an older one with --skip-tokenizer-init"
        )
    return answer


def _refusal(url: str, response: httpx.Response) -> Retry | Reject:
    status, detail = response.status_code, f"{url} answered {response.status_code}: {response.text[:_BODY_SHOWN]}"
    if status in (429, 503):
        return EngineBusy(f"http_{status}", detail, _retry_after(response))
    if status == 408 or status >= 500:
        return Retry(f"http_{status}", detail, _retry_after(response))
    return Reject(FailureReason.ENGINE_REJECTED, detail)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of the Retry-After header; a date in it is not worth a clock comparison."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else None


async def is_ready(http: httpx.AsyncClient, url: str) -> bool:
    """/ready answers at once; servers and routers without it have /health, which may run a one-token generation."""
    for path in ("/ready", "/health"):
        async with asyncio.timeout(30.0):
            response = await http.get(url + path)
        if response.status_code != 404:
            return response.status_code == 200
    return False


async def identity(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """What /server_info says of the engine; empty behind a router, which has no such route."""
    async with asyncio.timeout(30.0):
        response = await http.get(f"{url}/server_info")
    return msgspec.json.decode(response.content, type=dict[str, Any]) if response.status_code == 200 else {}
