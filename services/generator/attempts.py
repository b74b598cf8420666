"""From a prompt to its outcome: attempts on engines until one gives a sequence, or the prompt has failed."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import httpx

from schemas.prompts import Prompt
from schemas.sequences import Failure, FailureReason, Outcome, Sequence, reasoning_end
from services.generator import checks, sglang
from services.generator.engines import Engine, Engines
from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.kernel.errors import Reject, Retry
from services.kernel.retry import Backoff

log = logging.getLogger("tokenhaul.generator")


class Attempts:
    """Makes outcomes. Safe for any number of prompts at once."""

    def __init__(
        self, settings: GeneratorSettings, engines: Engines, http: httpx.AsyncClient, metrics: GeneratorMetrics
    ) -> None:
        self._settings, self._engines, self._http, self._metrics = settings, engines, http, metrics

    async def outcome(self, prompt: Prompt) -> Outcome:
        """The sequence of `prompt`, or its failure. A down or full engine is waited for and charges nothing."""
        rids: list[str] = []
        try:
            checks.check_prompt(prompt)
            return await self._sequence(prompt, rids)
        except Reject as reject:
            return Failure(
                id=prompt.id,
                reason=FailureReason(reject.reason),
                detail=reject.detail,
                prompt=prompt,
                rids=rids,
                attempts=len(rids),
                failed_at=time.time(),
            )

    async def _sequence(self, prompt: Prompt, rids: list[str]) -> Sequence:
        backoff, charged = Backoff(base=0.5, cap=30.0), 0
        while True:
            engine = await self._engines.acquire()
            # Engines abort by prefix: ids of one width never begin with one another. Random: unique per attempt.
            rids.append(f"{prompt.id.hex()}-{secrets.token_hex(6)}")
            try:
                return await self._attempt(prompt, engine, rids)
            except Retry as retry:
                self._metrics.retried(retry.cause)
                if isinstance(retry, sglang.EngineDown) or retry.cause == "connection_lost":
                    self._engines.suspect(engine)
                charged += not isinstance(retry, sglang.EngineDown | sglang.EngineBusy)
                if charged >= self._settings.attempts:
                    raise Reject(FailureReason.RETRIES_EXHAUSTED, f"{charged} attempts, the last: {retry}") from retry
                wait = backoff.next(retry.after)
                log.info("record %s: %s; again in %.1f s", prompt.id.hex(), retry, wait, extra={"action": "retry"})
            finally:
                self._engines.release(engine)
            await asyncio.sleep(wait)

    async def _attempt(self, prompt: Prompt, engine: Engine, rids: list[str]) -> Sequence:
        asked = prompt.sampling["max_new_tokens"]
        seconds = self._settings.request_seconds + asked * self._settings.token_seconds
        started, ended = time.monotonic(), "cancelled"
        try:
            answer = await sglang.generate(self._http, engine.url, prompt, rids[-1], seconds)
            output_ids = checks.check_answer(prompt, answer)
            ended = answer.meta_info.finish_reason.type
        except Retry as retry:
            ended = retry.cause
            raise
        except Reject as reject:
            ended = reject.reason
            raise
        finally:
            self._metrics.requests.labels(ended).inc()
        latency = time.monotonic() - started
        self._metrics.duration.observe(latency)
        meta = answer.meta_info
        return Sequence(
            prompt=prompt,
            output_ids=output_ids,
            finish_reason="stop" if ended == "stop" else "length",
            matched_stop=meta.finish_reason.matched,
            reasoning_end=reasoning_end(prompt.prompt_ids, output_ids, prompt.reasoning),
            rids=rids,
            attempts=len(rids),
            effective_max_new_tokens=asked,
            engine_capped=ended == "length" and len(output_ids) < asked,
            segments=[len(output_ids)],
            num_retractions=meta.num_retractions,
            engine_version=engine.version,
            weight_version=meta.weight_version,
            latency_seconds=latency,
            generated_at=time.time(),
        )
