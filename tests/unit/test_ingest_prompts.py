"""A line becomes a complete request with a lasting id, or a letter that names file, line and cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from schemas import ids
from schemas.dead import DeadLetter
from schemas.prompts import Prompt, SourceRef
from services.ingest import prompts as prompts_module
from services.ingest.lines import KEPT_BYTES, Line
from services.ingest.prompts import Made
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal
from tests.support.ingest import KIMI, chat, lines, maker


def decoded(made: Made) -> list[Prompt]:
    decoder = Decoder(Prompt)
    return [decoder.decode(ready.value) for ready in made.prompts]


def make(*records: Any, **asks: Any) -> list[Prompt]:
    return decoded(maker(**asks).make("in/s.jsonl", lines(*records)))


def test_a_prompt_is_complete() -> None:
    (prompt,) = make({"id": "q1", **chat("What is the capital of France? Answer in one word.")}, revision=3)
    assert len(prompt.prompt_ids) == 42  # as in the recordings of SGLang
    assert prompt.sampling == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": [2],
        "max_new_tokens": 64,
    }
    assert prompt.id == ids.record_id(prompt.prompt_ids, "the-model", prompt.sampling, 0, 3)
    assert prompt.seed == ids.seed(prompt.id)
    assert (prompt.source, prompt.source_ref) == ("s", SourceRef("in/s.jsonl", 1, "q1"))
    assert (prompt.conversation_id, prompt.revision, prompt.turn) == ("q1", 3, 0)
    assert (prompt.model, prompt.vocab_size, prompt.context_length) == ("the-model", 49152, 8192)
    assert prompt.messages == '[{"role":"user","content":"What is the capital of France? Answer in one word."}]'


def test_end_ids_of_config_and_tokenizer_are_both_stops() -> None:
    (prompt,) = make(chat("Hi"), directory=KIMI)
    assert prompt.sampling["stop_token_ids"] == [163585, 163586]


def test_samples_are_records_of_their_own() -> None:
    made = make(chat("Hi"), chat("Ho"), samples=3)
    assert [prompt.sample_index for prompt in made] == [0, 1, 2, 0, 1, 2]
    assert len({prompt.id for prompt in made}) == len({prompt.seed for prompt in made}) == 6
    assert len({prompt.conversation_id for prompt in made}) == 2


def test_an_id_depends_on_what_is_asked_and_on_nothing_else() -> None:
    (first,) = make(chat("Hi"), name="a")
    (second,) = make({"id": "x", "prompt": "Hi"}, name="b", store_messages=False)
    assert first.id == second.id
    others = [
        make(chat("Hi"), **ask)[0] for ask in ({"revision": 1}, {"max_new_tokens": 9}, {"sampling": {"top_k": 5}})
    ]
    assert len({first.id, *(other.id for other in others)}) == 4


def test_a_conversation_without_an_id_has_one_of_its_content() -> None:
    one, two, other = make({"prompt": "Hi"}, chat("Hi", "Ho"), chat("Ho"))
    assert one.conversation_id == two.conversation_id != other.conversation_id


def test_messages_are_left_out_when_not_wanted() -> None:
    (prompt,) = make(chat("Hi"), store_messages=False)
    assert (prompt.messages, prompt.tools) == (None, None)


@pytest.mark.parametrize(("room", "clamped"), [(64, False), (63, True), (1, True)])
def test_max_new_tokens_is_clamped_to_the_room_there_is(room: int, clamped: bool) -> None:
    (whole,) = make(chat("Hi"))
    (prompt,) = make(chat("Hi"), context=len(whole.prompt_ids) + room)
    assert (prompt.sampling["max_new_tokens"], prompt.clamped) == (min(64, room), clamped)


@pytest.mark.parametrize(("room", "sampling"), [(0, {}), (9, {"min_new_tokens": 10})])
def test_a_prompt_that_leaves_no_room_is_refused(room: int, sampling: dict[str, int]) -> None:
    (whole,) = make(chat("Hi"))
    used = maker(context=len(whole.prompt_ids) + room, sampling=sampling)
    assert used.make("s.jsonl", lines(chat("Hi"))).refused == {"prompt_too_long": 1}


def test_a_refused_line_is_a_letter_and_the_others_go_on() -> None:
    broken = b'{"prompt": "' + b"x" * 2 * KEPT_BYTES
    made = maker().make("in/s.jsonl", [Line(7, broken), Line(8, b"x", too_long=True), *lines(chat("Hi"))])
    assert (len(made.prompts), made.refused) == (1, {"not_json": 1, "line_too_long": 1})
    assert made.letters[0].key == b"s:in/s.jsonl:7"
    letter = Decoder(DeadLetter).decode(made.letters[0].value)
    assert (letter.stage, letter.reason, letter.source) == ("ingest", "not_json", "s")
    assert letter.source_ref == SourceRef("in/s.jsonl", 7)
    assert letter.record == broken[:KEPT_BYTES].decode()


def test_ids_the_model_does_not_have_end_the_run() -> None:
    with pytest.raises(Fatal, match="vocab_size is 9000: an engine would die of it"):
        maker(vocab=9000).make("s.jsonl", lines(chat("Hi")))


def test_a_prompt_larger_than_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "MAX_VALUE_BYTES", 100)
    made = maker().make("s.jsonl", lines(chat("Hi")))
    assert (made.prompts, made.refused) == ([], {"record_too_large": 1})


def test_a_batch_of_nothing_is_nothing() -> None:
    assert maker().make("s.jsonl", []) == Made([], [], Counter())


def test_every_turn_is_a_prompt_of_one_conversation() -> None:
    made = make(chat("Hi", "Ho", "More", "Well"), turns="each", samples=2)
    assert [(prompt.turn, prompt.sample_index) for prompt in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({prompt.conversation_id for prompt in made}) == 1
    (alone,) = make(chat("Hi"))
    assert made[0].prompt_ids == alone.prompt_ids


def test_ids_given_are_the_prompt() -> None:
    given = [151, 9, 49151]
    (prompt,) = make({"id": "a", "input_ids": given}, chat_template_kwargs={"thinking": False}, directory=KIMI)
    assert prompt.prompt_ids == given
    assert (prompt.messages, prompt.tools, prompt.chat_template_kwargs) == (None, None, {})
    assert prompt.conversation_id == "a"
    assert prompt.reasoning is not None
    assert not prompt.reasoning.opened
    (opened,) = make({"input_ids": [*given, 163606]}, directory=KIMI)
    assert opened.reasoning is not None
    assert opened.reasoning.opened


def test_metadata_arrives() -> None:
    (prompt,) = make({"prompt": "Hi", "topic": "a", "score": 1}, metadata=["topic"])
    assert prompt.metadata == {"topic": "a"}


def test_a_batch_line_wins_over_its_source() -> None:
    body = {"messages": chat("Hi")["messages"], "temperature": 0.2, "max_tokens": 7, "n": 2, "stop_token_ids": [9]}
    made = make({"custom_id": "r", "body": body}, sampling={"temperature": 0.9, "top_p": 0.5})
    assert [prompt.sample_index for prompt in made] == [0, 1]
    sampling = made[0].sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (0.2, 0.5, 7)
    assert sampling["stop_token_ids"] == [2, 9]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"stop_token_ids": [49152]}, "bad_sampling: stop_token_ids or logit_bias name [49152], beyond vocab_size"),
        ({"min_tokens": 65}, "bad_sampling: min_new_tokens 65 is above max_new_tokens 64"),
    ],
)
def test_what_a_batch_line_cannot_ask_of_the_model_is_refused(body: dict[str, Any], detail: str) -> None:
    made = maker().make("s.jsonl", lines({"body": {**chat("Hi"), **body}}))
    letter = Decoder(DeadLetter).decode(made.letters[0].value)
    assert f"{letter.reason}: {letter.detail}".startswith(detail)


def test_a_mix_of_samplings_is_shared_out_by_weight_and_stays_with_its_prompt() -> None:
    mix = [{"weight": 3, "temperature": 0.5}, {"temperature": 1.5}]
    records = [chat(f"Question {n}") for n in range(400)]
    used = maker(sampling=mix, samples=2)
    first = decoded(used.make("s.jsonl", lines(*records)))
    cool = [prompt for prompt in first if prompt.sampling["temperature"] == 0.5]
    assert 500 < len(cool) < 700  # 600 of 800
    assert all("weight" not in prompt.sampling for prompt in first)
    assert len({(p.conversation_id, p.sampling["temperature"]) for p in first}) == 400
    again = decoded(used.make("t.jsonl", lines(*reversed(records))))
    assert {prompt.id for prompt in again} == {prompt.id for prompt in first}


def test_no_more_text_is_encoded_at_once_than_memory_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    records = lines(chat(*[f"turn {number}" for number in range(20)]), b"no JSON", chat("one more"))
    making = maker(turns="each")
    whole = making.make("s.jsonl", records)
    at_once: list[int] = []
    encode = making.tokenizer.encode

    def counted(texts: Sequence[str]) -> list[list[int]]:
        at_once.append(sum(map(len, texts)))
        return encode(texts)

    monkeypatch.setattr(making.tokenizer, "encode", counted)
    monkeypatch.setattr(making.tokenizer, "at_once", 500)
    parts = making.make("s.jsonl", records)
    assert [ready.id for ready in parts.prompts] == [ready.id for ready in whole.prompts]
    assert [letter.row for letter in parts.letters] == [2]
    longest = len(making.tokenizer.decode(max((prompt.prompt_ids for prompt in decoded(whole)), key=len)))
    assert max(at_once) < 500 + longest < sum(at_once), "the turns of one line alone are more"
