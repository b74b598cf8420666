"""What is said to an SGLang server, and what its answers mean for a request: an answer, Retry or Reject."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec

from schemas.sequences import FailureReason
from services.generator.http import Broken, Http, NoConnection, Response
from services.kernel.errors import Fatal, Reject, Retry

log = logging.getLogger("tokenhaul.engines")

_BODY_SHOWN = 500
_WORKER_LOST = "call_upstream_request_error"
_LONGEST_WAIT_SECONDS = 300.0  # a proxy may say a day: meanwhile the prompt would hold up its partition's watermark
_DYING_SECONDS = 1.0
"""A router says the same of a worker that died of a request (which takes seconds) and of one that was gone before."""


CHECK = "check--"
"""Begins the rid of a request that only asks whether there are output_ids, and is as wide as every other with it."""
_CHECK_SECONDS = 10.0


class Request(msgspec.Struct, omit_defaults=True):
    """The body of /generate: nothing else is ever sent, and never both text and ids."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = False


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
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class Answer(msgspec.Struct):
    """The answer of /generate. Old servers and some settings leave output_ids out."""

    meta_info: MetaInfo
    output_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class EngineDown(Retry):
    """No connection could be made: nothing was sent, so nothing is charged to the prompt."""


class EngineBusy(Retry):
    """429 or 503: the engine took nothing on; nothing is charged to the prompt."""


class ConnectionLost(Retry):
    """It broke while the request was with the engine, which may have died of it."""


class WorkerLost(Retry):
    """A router's worker broke the connection after it had the request for a while: it may have died of it."""


class Aborted(Retry):
    """Status 200 and no data: somebody aborted the request. `tokens` were generated for nothing."""

    def __init__(self, detail: str, tokens: int) -> None:
        super().__init__("abort", detail)
        self.tokens = tokens


_decode = msgspec.json.Decoder(Answer).decode
_encode = msgspec.json.Encoder().encode


async def generate(http: Http, url: str, request: Request, seconds: float) -> Answer:
    """Ask the engine at `url`. Cancelled, the connection closes and the engine stops generating. Raises Retry,
    Reject(FailureReason) or Fatal."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            response = await http.post(f"{url}/generate", _encode(request))
    except TimeoutError as error:
        raise Retry("timeout", f"no answer of {url} within {seconds:.0f} s") from error
    except NoConnection as error:
        raise EngineDown("engine_down", str(error)) from error
    except Broken as error:
        raise ConnectionLost("connection_lost", str(error)) from error
    if response.status != 200:
        raise _refusal(url, response, time.monotonic() - began)
    return _answer(url, response.content)


async def without_ids(http: Http, url: str) -> str | None:
    """Why the answers of an engine cannot be used, found out with one token behind id 0, which every model has; None if
    they can, or if it does not tell now: whatever else is wrong, prompts are told apart from it."""
    request = Request(CHECK + secrets.token_hex(19), [0], {"max_new_tokens": 1, "temperature": 0.0})
    try:
        await generate(http, url, request, _CHECK_SECONDS)
    except Fatal as error:
        return str(error)
    except (Retry, Reject) as error:
        log.info("whether %s answers with output_ids is not known: %s", url, error, extra={"action": "engine"})
    return None


def _answer(url: str, content: bytes) -> Answer:
    try:
        answer = _decode(content)
    except msgspec.ValidationError as error:
        raise Reject(FailureReason.BAD_ANSWER, f"answer of {url} is not one of /generate: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Retry("not_json", f"answer of {url} is not JSON: {error}") from error
    finish = answer.meta_info.finish_reason
    if finish.type == "abort":
        raise Aborted(f"{url} aborted the request: {finish.message}", answer.meta_info.completion_tokens)
    if answer.output_ids is msgspec.UNSET:
        raise Fatal(
            f"the engine at {url} answers without output_ids, so the exact tokens cannot be had: use SGLang >= 0.5.1, "
            f"or start an older one with --skip-tokenizer-init"
        )
    return answer


def _refusal(url: str, response: Response, seconds: float) -> Retry | Reject:
    """Errors come in three body shapes, and as plain text: the status decides."""
    status, detail = response.status, f"{url} answered {response.status}: {response.text[:_BODY_SHOWN]}"
    if status == 500 and _WORKER_LOST in response.text:
        return WorkerLost("worker_lost", detail) if seconds > _DYING_SECONDS else Retry("worker_down", detail)
    # Nothing is wrong with the prompt in the next three: it must not fail because of what is wrong around it.
    if status in (401, 403):
        return EngineBusy(f"http_{status}", f"{detail} (is TOKENHAUL_GENERATOR_API_KEY right?)")
    if status in (404, 405) or status < 400:  # a redirect is not followed: the key would go with it
        return EngineBusy(f"http_{status}", f"{detail} (is it an SGLang server, or a proxy that hides its /generate?)")
    if status in (429, 503):
        return EngineBusy(f"http_{status}", detail, _retry_after(response))
    if status == 408 or status >= 500:
        return Retry(f"http_{status}", detail, _retry_after(response))
    return Reject(FailureReason.ENGINE_REJECTED, detail)


def _retry_after(response: Response) -> float | None:
    """Seconds of the Retry-After header, within reason; a date in it is not worth a clock comparison."""
    text = response.headers.get("retry-after", "")
    return min(float(text), _LONGEST_WAIT_SECONDS) if text.isdecimal() else None
