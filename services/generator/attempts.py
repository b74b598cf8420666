"""From a prompt to its outcome: attempts on engines until one gives a sequence, or the prompt has failed.

What passes costs the prompt an attempt only if an engine that is well had it. An engine that dies with requests in
flight died of one of them at most: each gets a death to its name, and whoever has too many is tried alone, on an engine
of its own. If that one dies too, the prompt is refused; the others were innocent, and lost nothing but time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from schemas.prompts import Prompt
from schemas.sequences import Failure, FailureReason, Outcome, Sequence, reasoning_end
from services.generator import checks, sglang
from services.generator.checks import Output
from services.generator.engine import Engine
from services.generator.engines import Engines
from services.generator.http import Http
from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.generator.sglang import Request
from services.kernel.errors import Reject, Retry, Stopped
from services.kernel.retry import Backoff

log = logging.getLogger("tokenhaul.generator")


class _Trail(msgspec.Struct):
    """What a prompt has been through."""

    began: float
    rids: list[str] = []
    charged: int = 0
    deaths: int = 0
    retractions: int = 0
    weight_version: str | None = None
    engine_version: str | None = None


class Attempts:
    """Makes outcomes. Safe for any number of prompts at once."""

    def __init__(
        self,
        settings: GeneratorSettings,
        engines: Engines,
        http: Http,
        metrics: GeneratorMetrics,
        cancelled: Callable[[str, float], bool],
    ) -> None:
        self._settings, self._engines, self._http, self._metrics = settings, engines, http, metrics
        self._cancelled = cancelled

    async def outcome(self, prompt: Prompt) -> Outcome:
        """The sequence of `prompt`, or its failure. Raises Stopped when the generator ends before it was sent."""
        trail = _Trail(began=time.monotonic())
        try:
            checks.check_prompt(prompt)
            outputs = [await self._output(prompt, trail, [])]
            if outputs[0].finish_reason == "length":
                await self._truncated(prompt, trail, outputs)
        except Reject as reject:
            return Failure(
                id=prompt.id,
                reason=FailureReason(reject.reason),
                detail=reject.detail,
                prompt=prompt,
                rids=trail.rids,
                attempts=len(trail.rids),
                failed_at=time.time(),
            )
        return self._sequence(prompt, trail, outputs, time.monotonic() - trail.began)

    async def _truncated(self, prompt: Prompt, trail: _Trail, outputs: list[Output]) -> None:
        """Deal with an output that reached its limit as the settings say; continuations are put behind it."""
        policy = self._settings.truncated
        if policy == "drop":
            self._metrics.waste("truncated", len(outputs[0].ids))
            raise Reject(FailureReason.TRUNCATED, f"the output reached max_new_tokens: {len(outputs[0].ids)} tokens")
        while policy == "continue" and outputs[-1].finish_reason == "length":
            so_far = [id for output in outputs for id in output.ids]
            if outputs[-1].capped or self._room(prompt, len(so_far)) < 1:
                return  # the engine gives no more, or there is no more room
            try:
                outputs.append(await self._output(prompt, trail, so_far))
            except (Reject, Stopped) as error:  # what there is stays: a truncated output is worth more than none
                log.info("record %s not continued: %s", prompt.id.hex(), error, extra={"action": "continue"})
                return

    def _room(self, prompt: Prompt, generated: int) -> int:
        """How many tokens the next request may give."""
        context = prompt.context_length - len(prompt.prompt_ids) - generated
        return min(_limit(prompt), self._settings.continue_tokens - generated, context) if generated else _limit(prompt)

    async def _output(self, prompt: Prompt, trail: _Trail, so_far: list[int]) -> Output:
        """What an engine gives behind the prompt and `so_far`. A down or full engine is waited for."""
        backoff = Backoff(base=0.5, cap=30.0)
        while True:
            alone = trail.deaths >= self._settings.deaths
            async with self._engines.place(alone=alone, begun=bool(trail.rids)) as engine:
                if not trail.rids:
                    self._metrics.placed(time.monotonic() - trail.began)
                if self._cancelled(prompt.source, prompt.created_at):
                    raise Reject(FailureReason.CANCELLED, f"source {prompt.source} was cancelled")
                try:
                    return await self._attempt(prompt, engine, trail, so_far)
                except Retry as error:
                    retry = error
            await self._blame(engine, retry, trail, alone=alone)
            if trail.charged >= self._settings.attempts:
                raise Reject(FailureReason.RETRIES_EXHAUSTED, f"{trail.charged} attempts, the last: {retry}")
            wait = backoff.next(retry.after)
            log.info("record %s: %s; again in %.1f s", prompt.id.hex(), retry, wait, extra={"action": "retry"})
            await asyncio.sleep(wait)

    async def _blame(self, engine: Engine, retry: Retry, trail: _Trail, *, alone: bool) -> None:
        """Who pays for an attempt that gave nothing."""
        cause = retry.cause
        match retry:
            case sglang.EngineBusy():
                engine.window.refused(time.monotonic(), engine.in_flight)
            case sglang.EngineDown():
                engine.probe_now.set()
            case sglang.WorkerLost():
                self._death(trail, alone=alone)
            case sglang.ConnectionLost() if await engine.died():
                if not engine.router:  # which no prompt can kill
                    self._death(trail, alone=alone)
                cause = "engine_death"
            case sglang.Aborted():
                self._metrics.waste("abort", retry.tokens)
                trail.charged += 1
            case _:
                trail.charged += 1
        self._metrics.retried(cause)

    @staticmethod
    def _death(trail: _Trail, *, alone: bool) -> None:
        trail.deaths += 1
        if alone:
            raise Reject(FailureReason.ENGINE_KILLER, f"{trail.deaths} engines died with it, the last alone")

    async def _attempt(self, prompt: Prompt, engine: Engine, trail: _Trail, so_far: list[int]) -> Output:
        limit = self._room(prompt, len(so_far))
        # Engines abort by prefix: ids of one width never begin with one another. Random: unique per attempt.
        rid = f"{prompt.id.hex()}-{secrets.token_hex(6)}"
        sampling = {**prompt.sampling, "max_new_tokens": limit, "sampling_seed": prompt.seed}
        request = Request(rid, prompt.prompt_ids + so_far, sampling, self._settings.logprobs)
        seconds = engine.deadline(limit, self._settings.request_seconds, self._settings.token_seconds)
        trail.rids.append(rid)
        began, ended, wasted = time.monotonic(), "cancelled", 0
        try:
            answer = await sglang.generate(self._http, engine.url, request, seconds)
            meta, wasted = answer.meta_info, answer.meta_info.completion_tokens
            output = checks.check_answer(request, answer, prompt.vocab_size)
            ended, wasted = output.finish_reason, 0
        except Retry as retry:
            ended = retry.cause
            raise
        except Reject as reject:
            ended = reject.reason
            self._metrics.waste(reject.reason, wasted)
            raise
        finally:
            self._metrics.requested(engine, ended, time.monotonic() - began)
        engine.finished(len(output.ids), time.monotonic() - began)
        engine.retracted += meta.num_retractions
        self._metrics.retracted(engine, meta.num_retractions)
        trail.retractions += meta.num_retractions
        trail.weight_version = meta.weight_version
        trail.engine_version = engine.identity.version if engine.identity else None
        return output

    def _sequence(self, prompt: Prompt, trail: _Trail, outputs: list[Output], seconds: float) -> Sequence:
        last, segments = outputs[-1], [len(output.ids) for output in outputs]
        output_ids = [id for output in outputs for id in output.ids]
        effective = (
            _limit(prompt)
            if len(outputs) == 1
            else min(self._settings.continue_tokens, prompt.context_length - len(prompt.prompt_ids))
        )
        return Sequence(
            prompt=prompt,
            output_ids=output_ids,
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            matched_stop=last.matched,
            reasoning_end=reasoning_end(prompt.prompt_ids, output_ids, prompt.reasoning),
            logprobs=[logprob for output in outputs for logprob in output.logprobs or ()] if last.logprobs else None,
            rids=trail.rids,
            attempts=len(trail.rids),
            effective_max_new_tokens=effective,
            engine_capped=last.capped,
            segments=segments,
            num_retractions=trail.retractions,
            engine_version=trail.engine_version,
            weight_version=trail.weight_version,
            latency_seconds=seconds,
            generated_at=time.time(),
        )


def _limit(prompt: Prompt) -> int:
    return int(prompt.sampling["max_new_tokens"])
