"""What a prompt has been through, and the outcome that is made of it in the end."""

from __future__ import annotations

import time

import msgspec

from schemas.prompts import Prompt
from schemas.sequences import Failure, FailureReason, Sequence, reasoning_end
from services.generator.checks import Output
from services.kernel.errors import Reject


class Trail(msgspec.Struct):
    """Attempts so far. `charged` are those the prompt pays for, `deaths` the engines that died with it in flight."""

    prompt: Prompt
    began: float
    """Of time.monotonic."""
    rids: list[str] = []
    outputs: list[Output] = []
    """More than one when a truncated output was continued."""
    charged: int = 0
    deaths: int = 0
    retractions: int = 0
    weight_version: str | None = None
    engine_version: str | None = None

    @property
    def output_ids(self) -> list[int]:
        """All that was generated."""
        return [id for output in self.outputs for id in output.ids]

    def death(self, *, alone: bool) -> None:
        """An engine died with it. Raises Reject if it was alone there."""
        self.deaths += 1
        if alone:
            raise Reject(FailureReason.ENGINE_KILLER, f"{self.deaths} engines died with it, the last alone")

    def failure(self, reject: Reject) -> Failure:
        """The prompt has failed."""
        return Failure(
            id=self.prompt.id,
            reason=FailureReason(reject.reason),
            detail=reject.detail,
            prompt=self.prompt,
            rids=self.rids,
            attempts=len(self.rids),
            failed_at=time.time(),
        )

    def sequence(self, effective_max_new_tokens: int) -> Sequence:
        """The prompt and all that was generated."""
        prompt, output_ids, last = self.prompt, self.output_ids, self.outputs[-1]
        logprobs = [logprob for output in self.outputs for logprob in output.logprobs or ()]
        return Sequence(
            prompt=prompt,
            output_ids=output_ids,
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            matched_stop=last.matched,
            reasoning_end=reasoning_end(prompt.prompt_ids, output_ids, prompt.reasoning),
            logprobs=logprobs if last.logprobs else None,
            rids=self.rids,
            attempts=len(self.rids),
            effective_max_new_tokens=effective_max_new_tokens,
            engine_capped=last.capped,
            segments=[len(output.ids) for output in self.outputs],
            num_retractions=self.retractions,
            engine_version=self.engine_version,
            weight_version=self.weight_version,
            latency_seconds=time.monotonic() - self.began,
            generated_at=time.time(),
        )
