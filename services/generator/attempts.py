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
from functools import partial

from schemas.prompts import Prompt
from schemas.sequences import FailureReason, Outcome
from services.generator import checks, sglang
from services.generator.checks import Output
from services.generator.engine import Engine
from services.generator.engines import Engines
from services.generator.http import Http
from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.generator.sglang import Request
from services.generator.trail import Trail
from services.kernel.errors import Reject, Retry, Stopped
from services.kernel.retry import Backoff

log = logging.getLogger("tokenhaul.generator")

_GRAMMARS = {"json_schema", "regex", "ebnf", "structural_tag"}


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
        trail = Trail(prompt, began=time.monotonic())
        try:
            checks.check_prompt(prompt)
            trail.outputs.append(await self._output(trail))
            if trail.outputs[0].finish_reason == "length":
                await self._truncated(trail)
        except Reject as reject:
            return trail.failure(reject)
        return trail.sequence(self._most(prompt) if len(trail.outputs) > 1 else _limit(prompt))

    async def _truncated(self, trail: Trail) -> None:
        """Deal with an output that reached its limit as the settings say; continuations are put behind it."""
        policy = self._settings.truncated
        if policy == "continue" and trail.prompt.sampling.keys() & _GRAMMARS:
            return  # the engine would begin the grammar anew in the middle of the output
        if policy == "drop":
            tokens = len(trail.output_ids)
            self._metrics.waste("truncated", tokens)
            raise Reject(FailureReason.TRUNCATED, f"the output reached max_new_tokens: {tokens} tokens")
        while policy == "continue" and trail.outputs[-1].finish_reason == "length":
            if trail.outputs[-1].capped or len(trail.output_ids) >= self._most(trail.prompt):
                return  # the engine gives no more, or there is no more room
            try:
                trail.outputs.append(await self._output(trail))
            except (Reject, Stopped) as error:  # what there is stays: a truncated output is worth more than none
                log.info("not continued: %s", error, extra={"action": "continue"})
                return

    def _most(self, prompt: Prompt) -> int:
        """How long an output may get with all its continuations."""
        return min(self._settings.continue_tokens, prompt.context_length - len(prompt.prompt_ids))

    async def _output(self, trail: Trail) -> Output:
        """What an engine gives behind the prompt and all outputs so far. A down or full engine is waited for."""
        prompt, backoff = trail.prompt, Backoff(base=0.5, cap=30.0)
        while True:
            alone = trail.deaths >= self._settings.deaths
            if refusal := self._unwanted(prompt):
                raise refusal
            unwanted = partial(self._unwanted, prompt)
            async with self._engines.place(alone=alone, begun=bool(trail.rids), unwanted=unwanted) as engine:
                if not trail.rids:
                    self._metrics.placed(time.monotonic() - trail.began)
                if refusal := unwanted():
                    raise refusal
                try:
                    return await self._attempt(trail, engine)
                except Retry as error:
                    retry = error
            await self._blame(engine, retry, trail, alone=alone)
            if trail.charged >= self._settings.attempts:
                raise Reject(FailureReason.RETRIES_EXHAUSTED, f"{trail.charged} attempts, the last: {retry}")
            wait = backoff.next(retry.after)
            log.info("%s; again in %.1f s", retry, wait, extra={"action": "retry"})
            await asyncio.sleep(wait)

    def _unwanted(self, prompt: Prompt) -> Reject | None:
        if self._cancelled(prompt.source, prompt.created_at):
            return Reject(FailureReason.CANCELLED, f"source {prompt.source} was cancelled")
        return None

    async def _blame(self, engine: Engine, retry: Retry, trail: Trail, *, alone: bool) -> None:
        """Who pays for an attempt that gave nothing."""
        cause = retry.cause
        match retry:
            case sglang.EngineBusy():
                engine.window.refused(time.monotonic(), engine.in_flight)
            case sglang.EngineDown():
                engine.probe_now.set()
            case sglang.WorkerLost():
                trail.death(alone=alone)
            case sglang.ConnectionLost() if await engine.died():
                if not engine.router:  # which no prompt can kill
                    trail.death(alone=alone)
                cause = "engine_death"
            case sglang.Aborted():
                self._metrics.waste("abort", retry.tokens)
                trail.charged += 1
            case _:
                trail.charged += 1
        self._metrics.retried(cause)

    async def _attempt(self, trail: Trail, engine: Engine) -> Output:
        prompt, so_far = trail.prompt, trail.output_ids
        limit = min(_limit(prompt), self._most(prompt) - len(so_far)) if so_far else _limit(prompt)
        # Engines abort by prefix: ids of one width never begin with one another. Random: unique per attempt.
        rid = f"{prompt.id.hex()}-{secrets.token_hex(6)}"
        sampling = {**prompt.sampling, "max_new_tokens": limit, "sampling_seed": prompt.seed}
        if so_far and (least := sampling.get("min_new_tokens")):
            sampling["min_new_tokens"] = max(0, least - len(so_far))
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
        self._metrics.answered(engine, len(output.ids), meta.num_retractions)
        trail.retractions += meta.num_retractions
        trail.weight_version = meta.weight_version
        trail.engine_version = engine.identity.version if engine.identity else None
        return output


def _limit(prompt: Prompt) -> int:
    return int(prompt.sampling["max_new_tokens"])
