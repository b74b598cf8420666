"""What must hold of a prompt before it is sent and of an answer before it is data. Pure.

Nothing is repaired: what the engine reports inconsistently is refused under a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids

from schemas.prompts import Prompt
from schemas.sequences import FailureReason
from services.generator.sglang import Answer
from services.kernel.errors import Reject


def check_prompt(prompt: Prompt) -> None:
    """Raise Reject for a prompt that would harm an engine: one id outside the vocabulary kills a whole server."""
    if not prompt.prompt_ids or not _in_vocabulary(prompt.prompt_ids, prompt.vocab_size):
        raise Reject(
            FailureReason.PROMPT_OUT_OF_VOCABULARY,
            f"prompt ids must be in [0, {prompt.vocab_size}) and at least one",
        )


def check_answer(prompt: Prompt, answer: Answer) -> list[int]:
    """The output ids of `answer`, if it is consistent in itself and with the prompt. Raises Reject."""
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
    if meta.prompt_tokens != len(prompt.prompt_ids):
        raise Reject(
            FailureReason.PROMPT_TOKENS_MISMATCH,
            f"{len(prompt.prompt_ids)} prompt ids were sent, prompt_tokens {meta.prompt_tokens}",
        )
    if not ids:
        raise Reject(FailureReason.EMPTY_OUTPUT, f"no output id, finish_reason {finish.type}")
    if not _in_vocabulary(ids, prompt.vocab_size):
        raise Reject(FailureReason.OUTPUT_OUT_OF_VOCABULARY, f"an output id is outside [0, {prompt.vocab_size})")
    if finish.type == "stop" and isinstance(finish.matched, int) and ids[-1] != finish.matched:
        raise Reject(FailureReason.STOP_MISMATCH, f"stop id {finish.matched} matched, the output ends with {ids[-1]}")
    return ids


def _in_vocabulary(ids: Ids[int], vocab_size: int) -> bool:
    return min(ids) >= 0 and max(ids) < vocab_size
