"""The story this project came from: the tokens of a Kimi-like model that text would lose travel untouched."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.prompts import Prompt
from schemas.sequences import Sequence, reasoning_end
from services.kernel.codec import Decoder
from services.sink.rows import row as sink_row
from services.sink.rows import table
from tests.support.ingest import KIMI, chat, lines, maker, tokenizer

THINK, END_THINK = 163606, 163607
TOOL_CALL = [163595, 163597, 163598, 163599, 163596]
END_OF_TURN = 163586


def prompt(**asks: Any) -> Prompt:
    (ready,) = maker(KIMI, **asks).make("s.jsonl", lines(chat("What is 6 times 7?"))).prompts
    return Decoder(Prompt).decode(ready.value)


@pytest.mark.parametrize(("tag", "id"), [("<think>", THINK), ("</think>", END_THINK)])
def test_think_tags_are_single_ids_both_ways(tag: str, id: int) -> None:
    assert tokenizer(KIMI).encode([tag]) == [[id]]
    assert tokenizer(KIMI).decode([id]) == tag


def test_the_prompt_ends_with_a_think_nobody_generates() -> None:
    asked = prompt()
    assert asked.prompt_ids[-4:] == [163588, 69702, 163601, THINK]
    assert asked.reasoning is not None
    assert (asked.reasoning.open, asked.reasoning.close, asked.reasoning.opened) == ([THINK], [END_THINK], True)


def test_the_row_is_prompt_and_output_untouched() -> None:
    asked = prompt()
    output = [50, 84, END_THINK, 70, *TOOL_CALL, END_OF_TURN]
    end = reasoning_end(asked.prompt_ids, output, asked.reasoning)
    outcome = Sequence(
        prompt=asked,
        output_ids=output,
        finish_reason="stop",
        matched_stop=END_OF_TURN,
        reasoning_end=end,
        rids=["r"],
        attempts=1,
        effective_max_new_tokens=64,
        segments=[len(output)],
        latency_seconds=1.0,
        generated_at=1.0,
    )
    (row,) = table([sink_row(outcome, 0)]).to_pylist()
    assert row["input_ids"] == asked.prompt_ids + output
    assert row["loss_mask"] == [0] * len(asked.prompt_ids) + [1] * len(output)
    assert row["input_ids"][row["reasoning_end"]] == END_THINK
    assert row["reasoning_end"] == len(asked.prompt_ids) + 2


def test_without_thinking_the_prompt_closes_what_it_opens() -> None:
    asked = prompt(chat_template_kwargs={"thinking": False})
    assert asked.prompt_ids[-2:] == [THINK, END_THINK]
    assert asked.reasoning is not None
    assert not asked.reasoning.opened
    assert reasoning_end(asked.prompt_ids, [50, END_OF_TURN], asked.reasoning) is None


def test_both_ends_of_a_turn_are_stops() -> None:
    assert prompt().sampling["stop_token_ids"] == [163585, END_OF_TURN]
