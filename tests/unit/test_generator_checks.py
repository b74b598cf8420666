"""What is refused before it is sent, and which answers are no data: each under its name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.sequences import FailureReason
from services.generator.checks import Output, check_answer, check_prompt
from services.generator.sglang import Answer, Request
from services.kernel.errors import Reject
from tests.support.stream import make_prompt

VOCABULARY = 100
REQUEST = Request("r", [1, 2, 3], {"max_new_tokens": 8})
STOP = {"type": "stop", "matched": 7}


def answer(ids: list[int], finish: dict[str, Any] = STOP, **meta: Any) -> Answer:
    info = {"id": "r", "finish_reason": finish, "completion_tokens": len(ids), "prompt_tokens": 3, **meta}
    return msgspec.convert({"output_ids": ids, "meta_info": info}, Answer)


@pytest.mark.parametrize("ids", [[], [-1], [5, 49152], [2**40]])
def test_a_prompt_that_would_harm_an_engine_is_refused(ids: list[int]) -> None:
    prompt = msgspec.structs.replace(make_prompt(1), prompt_ids=ids)
    with pytest.raises(Reject) as refused:
        check_prompt(prompt)
    assert refused.value.reason == FailureReason.PROMPT_OUT_OF_VOCABULARY


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (answer([5, 7]), Output([5, 7], "stop", 7, False, None)),
        (answer([5, 6], {"type": "stop", "matched": "###"}), Output([5, 6], "stop", "###", False, None)),
        (answer([5] * 8, {"type": "length", "length": 8}), Output([5] * 8, "length", None, False, None)),
        (answer([5, 6], {"type": "length", "length": 2}), Output([5, 6], "length", None, True, None)),
        (answer([0, 99, 7]), Output([0, 99, 7], "stop", 7, False, None)),
    ],
    ids=["stop id", "stop string keeps its ids", "limit", "capped by the engine", "ends of the vocabulary"],
)
def test_a_consistent_answer_is_kept_as_it_is(given: Answer, expected: Output) -> None:
    assert check_answer(REQUEST, given, VOCABULARY) == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer([5], {"type": "mystery"}), FailureReason.BAD_ANSWER),
        (answer([5, 7], {"type": "stop", "matched": "NaN happened"}), FailureReason.NAN),
        (answer([5, 7], completion_tokens=3), FailureReason.COMPLETION_TOKENS_MISMATCH),
        (answer([5, 7], prompt_tokens=2), FailureReason.PROMPT_TOKENS_MISMATCH),
        (answer([5, 7], prompt_tokens=None), FailureReason.PROMPT_TOKENS_MISMATCH),
        (answer([]), FailureReason.EMPTY_OUTPUT),
        (answer([100, 7]), FailureReason.OUTPUT_OUT_OF_VOCABULARY),
        (answer([-1, 7]), FailureReason.OUTPUT_OUT_OF_VOCABULARY),
        (answer([7, 5]), FailureReason.STOP_MISMATCH),
    ],
    ids=lambda value: value.name if isinstance(value, FailureReason) else "",
)
def test_a_contradiction_is_refused_under_its_name(given: Answer, reason: FailureReason) -> None:
    with pytest.raises(Reject) as refused:
        check_answer(REQUEST, given, VOCABULARY)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "logprobs",
    [None, [[-0.5, 5, None]], [[-0.5, 5, None], [-0.25, 6, None]], [[-0.5, 5, None], [None, 7, None]]],
    ids=["none", "too few", "of another id", "null"],
)
def test_logprobs_are_those_of_the_ids(logprobs: object) -> None:
    request = msgspec.structs.replace(REQUEST, return_logprob=True)
    good = answer([5, 7], output_token_logprobs=[[-0.5, 5, None], [-0.25, 7, None]])
    assert check_answer(request, good, VOCABULARY).logprobs == [-0.5, -0.25]
    with pytest.raises(Reject) as refused:
        check_answer(request, answer([5, 7], output_token_logprobs=logprobs), VOCABULARY)
    assert refused.value.reason == FailureReason.LOGPROBS_MISMATCH
