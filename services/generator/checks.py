"""What must hold of a prompt before it is sent and of an answer before it is data. Pure.

Nothing is repaired: what the engine reports inconsistently is refused under a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

import msgspec

from schemas.prompts import Prompt
from schemas.sequences import FailureReason
from services.generator.sglang import Answer, Request
from services.kernel.errors import Reject


class Output(msgspec.Struct, frozen=True):
    """What one request gave: ids, why it ended, and the log probability of each id if asked for. `capped`: it ended by
    its length before the length it was allowed."""

    ids: list[int]
    finish_reason: str
    matched: int | str | None
    capped: bool
    logprobs: list[float] | None


def check_prompt(prompt: Prompt) -> None:
    """Raise Reject for a prompt that would harm an engine: one id outside the vocabulary kills a whole server."""
    if not prompt.prompt_ids or not _in_vocabulary(prompt.prompt_ids, prompt.vocab_size):
        raise Reject(
            FailureReason.PROMPT_OUT_OF_VOCABULARY,
            f"prompt ids must be in [0, {prompt.vocab_size}) and at least one",
        )


def check_answer(request: Request, answer: Answer, vocab_size: int) -> Output:
    """What `answer` gives, if it is consistent in itself and with the request. Raises Reject."""
    ids, meta = answer.output_ids, answer.meta_info
    assert isinstance(ids, list)  # sglang.generate refuses an answer without
    finish = meta.finish_reason
    if finish.type not in ("stop", "length"):
        raise Reject(FailureReason.BAD_ANSWER, f"unknown finish_reason {finish.type!r}")
    if isinstance(finish.matched, str) and finish.matched.startswith("NaN happened"):
        raise Reject(FailureReason.NAN, "the engine computed NaN and wrote an end id over the last token")
    if len(ids) != meta.completion_tokens:
        raise Reject(
            FailureReason.COMPLETION_TOKENS_MISMATCH,
            f"{len(ids)} output_ids, completion_tokens {meta.completion_tokens}",
        )
    if meta.prompt_tokens != len(request.input_ids):
        raise Reject(
            FailureReason.PROMPT_TOKENS_MISMATCH,
            f"{len(request.input_ids)} ids were sent, prompt_tokens {meta.prompt_tokens}",
        )
    if not ids:
        raise Reject(FailureReason.EMPTY_OUTPUT, f"no output id, finish_reason {finish.type}")
    if not _in_vocabulary(ids, vocab_size):
        raise Reject(FailureReason.OUTPUT_OUT_OF_VOCABULARY, f"an output id is outside [0, {vocab_size})")
    if finish.type == "stop" and isinstance(finish.matched, int) and ids[-1] != finish.matched:
        raise Reject(FailureReason.STOP_MISMATCH, f"stop id {finish.matched} matched, the output ends with {ids[-1]}")
    capped = finish.type == "length" and len(ids) < request.sampling_params["max_new_tokens"]
    logprobs = _logprobs(ids, answer) if request.return_logprob else None
    return Output(ids, finish.type, finish.matched, capped, logprobs)


def _logprobs(ids: list[int], answer: Answer) -> list[float]:
    given = answer.meta_info.output_token_logprobs or []
    if [id for _, id, _ in given] != ids or any(logprob is None for logprob, _, _ in given):
        raise Reject(FailureReason.LOGPROBS_MISMATCH, "output_token_logprobs are not one for each of output_ids")
    return [float(logprob) for logprob, _, _ in given if logprob is not None]


def _in_vocabulary(ids: Ids[int], vocab_size: int) -> bool:
    return min(ids) >= 0 and max(ids) < vocab_size
