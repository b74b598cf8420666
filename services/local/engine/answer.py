"""The bodies of `POST /generate`: one JSON object per sequence, with the keys of SGLang 0.5.23."""

from __future__ import annotations

import time
from typing import Any

from services.local.engine.errors import Refusal
from services.local.engine.jobs import Job
from services.local.engine.stops import Decode, FinishReason, visible_text

WEIGHT_VERSION = "default"


def whole(job: Job, decode: Decode) -> dict[str, Any]:
    """The answer of a job that is done: text, output_ids, meta_info and, if asked for, prompt_token_ids."""
    latency = job.finished - job.received
    if not job.started and job.finish_reason is not None:
        return never_ran(job.generation.rid, job.finish_reason, latency)
    ids = job.output_ids
    meta = _meta_info(job, ids, decode)
    meta |= {
        "finish_reason": job.finish_reason,
        "weight_versions": _weight_versions(len(ids)),
        "e2e_latency": latency,
        "response_sent_to_client_ts": time.time(),
    }
    text = visible_text(job.generation, ids, job.finish_reason, decode)
    answer = {"text": text, "output_ids": ids, "meta_info": meta}
    if job.generation.return_prompt_ids:
        answer["prompt_token_ids"] = job.generation.prompt_ids
    return answer


def chunk(job: Job, count: int, decode: Decode) -> dict[str, Any]:
    """The first `count` ids of a job, as a stream shows them before its end: cumulative, not finished."""
    ids = job.output_ids[:count]
    text = visible_text(job.generation, ids, None, decode)
    return {"text": text, "output_ids": ids, "meta_info": _meta_info(job, ids, decode)}


def never_ran(rid: str, reason: FinishReason, latency: float) -> dict[str, Any]:
    """The short answer for a sequence aborted while it waited, or (streams) refused by a full queue."""
    meta = {
        "id": rid,
        "finish_reason": reason,
        "weight_version": WEIGHT_VERSION,
        "e2e_latency": latency,
        "weight_versions": _weight_versions(0),
        "completion_tokens": 0,
        "response_sent_to_client_ts": time.time(),
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


def refusal_events(refusal: Refusal, rids: list[str]) -> list[dict[str, Any]]:
    """What a stream says in place of a status: an abort per sequence if the queue is full, else an error."""
    if refusal.status == 503:
        reason = {"type": "abort", "status_code": 503, "message": refusal.message}
        return [never_ran(rid, reason, 0.0) for rid in rids]
    error = {"message": refusal.message, "type": "invalid_request_error", "code": refusal.status}
    return [{"error": {**error, "retryable": False}}]


def _meta_info(job: Job, ids: list[int], decode: Decode) -> dict[str, Any]:
    generation, cached = job.generation, job.cached_tokens
    meta: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": None,
        "prompt_tokens": len(generation.prompt_ids),
        "weight_version": WEIGHT_VERSION,
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
    }
    if generation.return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob, token, decode([token], False) if generation.text_in_logprobs else None]
            for logprob, token in zip(job.logprobs, ids, strict=False)
        ]
        meta["output_token_logprobs_length"] = len(ids)
    return meta


def _weight_versions(end: int) -> list[dict[str, Any]]:
    return [{"version": WEIGHT_VERSION, "start": 0, "end": end}]
