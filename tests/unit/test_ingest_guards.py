"""What would spoil a prompt unnoticed is refused, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.dead import DeadLetter
from services.ingest.guards import ControlTokens
from services.ingest.prompts import Made
from services.kernel.codec import Decoder
from services.kernel.overlap import Overlap
from tests.support.ingest import KIMI, SMOLLM2, chat, lines, maker, with_template

TOOLS = [{"name": "look_up", "description": "the <|im_end|> tool", "parameters": {"type": "object"}}]


def refusals(made: Made) -> list[tuple[str, str]]:
    decoder = Decoder(DeadLetter)
    letters = [decoder.decode(letter.value) for letter in made.letters]
    return [(letter.reason, letter.detail) for letter in letters]


def refused(directory: Path, record: dict[str, Any], **asks: Any) -> list[tuple[str, str]]:
    return refusals(maker(directory, **asks).make("s.jsonl", lines(record)))


@pytest.mark.parametrize(
    ("directory", "record", "detail"),
    [
        (SMOLLM2, chat("Say <|im_end|>!"), "turn 1 says '<|im_end|>', which would become that control token itself"),
        (SMOLLM2, {"system": "<|im_start|>", "prompt": "Hi"}, "turn 1 says '<|im_start|>'"),
        (KIMI, chat("Hi", "Ho", "What does <think> do?"), "turn 3 says '<think>'"),
        (KIMI, chat("a [EOS] b"), "turn 1 says '[EOS]'"),
        (KIMI, {**chat("Hi"), "tools": TOOLS}, "tools says '<|im_end|>'"),
        (
            KIMI,
            {"conversations": [
                {"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "<|im_user|>"}]},
            "turn 3 says '<|im_user|>'",
        ),
    ],
)  # fmt: skip
def test_control_tokens_typed_by_a_user_are_refused(directory: Path, record: dict[str, Any], detail: str) -> None:
    ((reason, told),) = refused(directory, record)
    assert reason == "control_token"
    assert detail in told
    assert "`control_tokens: allow` in the source lets it" in told
    assert refused(directory, record, control_tokens="allow") == []


@pytest.mark.parametrize("text", ["a < b | c", "<im_end>", "<|im_end", "[EO]", "<thinking>", ""])
def test_what_only_resembles_a_control_token_is_asked(text: str) -> None:
    assert refused(KIMI, chat(f"Hi {text}")) == []


def test_a_control_token_in_the_name_of_a_turn_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    record = {"messages": [{"role": "user", "name": "Ann<|im_end|>", "content": "Hi"}]}
    ((reason, told),) = refused(with_template(template, tmp_path), record)
    assert (reason, told[:24]) == ("control_token", "turn 1 says '<|im_end|>'")


def test_what_the_assistant_said_is_left_to_the_template() -> None:
    assert refused(KIMI, chat("Hi", "<think>hm</think>Ho", "More")) == []


def test_the_first_control_token_is_named_however_they_begin() -> None:
    control = ControlTokens(["<s>", "<s2>", "[X]", "<", "<|end|>"])
    found = [control.find(text) for text in ("a <s2> <s>", "[X", "x<", "<<|end|>", "[[X]")]
    assert found == ["<", None, "<", "<", "[X]"]
    assert ControlTokens(["<|end|>", "<|x|>"]).find("<<|<|x|>") == "<|x|>"
    assert ControlTokens([]).find("anything") is None


def test_turns_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    """What it writes in another form is there."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | upper }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    directory = with_template(template, tmp_path)
    assert refused(directory, chat("shout this")) == []
    left_out = [("turn_ignored", "the chat template leaves turn 1, the system's, out of the prompt")]
    assert refused(directory, {"system": "Be brief", "prompt": "HI"}) == left_out


def test_a_turn_left_out_is_missed_although_another_says_the_same(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    record = {"system": "Be brief", "prompt": "Who says: Be brief"}
    ((reason, told),) = refused(with_template(template, tmp_path), record)
    assert (reason, told[:36]) == ("turn_ignored", "the chat template leaves turn 1, the")


def test_turns_a_template_writes_elsewhere_are_asked(tmp_path: Path) -> None:
    """As DeepSeek-V3's does, which gathers system turns at the front."""
    template = (
        "{% for role in ('system', 'user') %}{% for m in messages if m.role == role %}{{ m.content }};{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    turns = [{"role": role, "content": f"says the {role}"} for role in ("user", "system")]
    record = {"messages": [*turns, {"role": "user", "content": "Go"}]}
    assert refused(with_template(template, tmp_path), record) == []


def test_a_benchmarks_questions_are_refused_before_they_are_paid_for() -> None:
    overlap = Overlap()
    overlap.add("bench.jsonl", [(7, "What is the capital of France?")])
    used = maker()
    used = type(used)(used.request, used.tokenizer, store_messages=True, overlap=overlap)
    records = [chat("Hi", "Ho", "what is the capital of FRANCE"), chat("What is the capital of Spain?")]
    made = used.make("s.jsonl", lines(*records))
    assert len(made.prompts) == 1
    assert refusals(made) == [("excluded", "overlaps with bench.jsonl, line 7 (the same text)")]
    given = used.tokenizer.encode(["What is the capital of France?"])[0]
    assert refusals(used.make("s.jsonl", lines({"input_ids": given}))) == refusals(made)


@pytest.mark.parametrize(
    ("asks", "detail"),
    [
        ({"max_prompt_tokens": 30}, "31 ids, the source's max_prompt_tokens is 30"),
        ({"context": 100, "min_room": 70}, "31 ids of a context of 100"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused(asks: dict[str, Any], detail: str) -> None:
    assert refused(SMOLLM2, chat("Hi"), **asks) == [("prompt_too_long", detail)]


def test_one_turn_too_long_costs_that_turn_only() -> None:
    record = chat("Hi", "Ho", "More " * 30, "Ho", "x")
    made = maker(turns="each", max_prompt_tokens=50).make("s.jsonl", lines(record))
    assert (len(made.prompts), made.refused) == (1, {"prompt_too_long": 2})
    assert [letter.key for letter in made.letters] == [b"s:s.jsonl:1:1", b"s:s.jsonl:1:2"]
    assert refusals(made)[0][1].startswith("turn 1: ")


def test_given_ids_beyond_the_vocabulary_cost_their_record_only() -> None:
    made = maker().make("s.jsonl", lines({"input_ids": [1, 49152]}, {"input_ids": [1, 49151]}))
    assert len(made.prompts) == 1
    assert refusals(made) == [("ids_beyond_vocabulary", "id 49152, vocab_size is 49152")]


def test_metadata_no_message_can_hold_is_refused() -> None:
    line = b'{"prompt": "Hi", "big": ' + b"9" * 30 + b"}"
    assert refusals(maker(metadata="all").make("s.jsonl", lines(line))) == [
        ("bad_field", "metadata holds an integer of more than 64 bits")
    ]
    assert msgspec.json.decode(line)["big"] > 2**64
