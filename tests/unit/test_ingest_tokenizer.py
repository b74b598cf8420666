"""Prompts have the ids plain transformers gives, or do not come to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from schemas.prompts import Prompt, Reasoning
from services.ingest import preflight
from services.ingest.lines import Line
from services.ingest.prompts import Refused
from services.ingest.sources import Source, Sources
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal
from tests.support.ingest import KIMI, PROMPTS, SMOLLM2, chat, lines, maker, tokenizer, with_template

TOOLS = [{"name": "look_up", "parameters": {"type": "object", "properties": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
CALLED: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ],
}


def made(directory: Path, *records: Any, **asks: Any) -> tuple[list[Prompt], list[str]]:
    """(prompts, reasons of refusal)."""
    result = maker(directory, **asks).make("s.jsonl", lines(*records))
    decoder = Decoder(Prompt)
    return [decoder.decode(ready.value) for ready in result.prompts], list(result.refused.elements())


@pytest.mark.parametrize("directory", [SMOLLM2, KIMI], ids=["smollm2", "kimi-like"])
@pytest.mark.parametrize("file", PROMPTS, ids=lambda file: file.stem)
def test_ids_are_those_of_plain_transformers_one_by_one(file: Path, directory: Path) -> None:
    plain = AutoTokenizer.from_pretrained(directory)
    rows = [Line(row, data) for row, data in enumerate(file.read_bytes().splitlines(), 1)]
    result = maker(directory).make(file.name, rows)
    with_tools = file.stem in ("openai_tools", "sharegpt_tools", "glaive_raw")
    ignored = len(rows) if with_tools and directory == SMOLLM2 else 0
    assert dict(result.refused) == ({"tools_ignored": ignored} if ignored else {})
    assert len(result.prompts) == len(rows) - ignored
    for ready in result.prompts:
        prompt = Decoder(Prompt).decode(ready.value)
        assert prompt.messages is not None
        tools = json.loads(prompt.tools) if prompt.tools else None
        ids = plain.apply_chat_template(
            json.loads(prompt.messages), tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert prompt.prompt_ids == ids


def test_openai_messages_are_rendered_as_the_file_gives_them() -> None:
    file = next(file for file in PROMPTS if file.stem == "openai_messages")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    asked = [[turn for turn in record["messages"] if turn["role"] != "assistant"] for record in records]
    plain = AutoTokenizer.from_pretrained(SMOLLM2)
    wanted = [plain.apply_chat_template(turns, add_generation_prompt=True, return_dict=False) for turns in asked]
    assert [prompt.prompt_ids for prompt in made(SMOLLM2, *records)[0]] == wanted


def test_a_tokenizer_told_to_truncate_and_pad_does_neither_here(tmp_path: Path) -> None:
    shutil.copytree(SMOLLM2, tmp_path / "t")
    document = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "<|im_end|>",
    }  # fmt: skip
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(document))
    texts = ["short", "a text of far more than four tokens, all of them wanted"]
    assert ChatTokenizer(tmp_path / "t").encode(texts) == tokenizer(SMOLLM2).encode(texts)


def test_a_tokenizer_that_adds_its_own_bos_adds_none_to_a_rendered_prompt(tmp_path: Path) -> None:
    shutil.copytree(SMOLLM2, tmp_path / "t")
    document = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(document))
    ((with_bos,), _), ((without,), _) = made(tmp_path / "t", chat("Hi")), made(SMOLLM2, chat("Hi"))
    assert with_bos.prompt_ids == without.prompt_ids


def test_tools_and_calls_in_the_prompt_are_asked() -> None:
    prompts, refused = made(KIMI, {**CALLED, "tools": TOOLS}, CALLED)
    assert refused == []
    declared, called = (tokenizer(KIMI).decode(prompt.prompt_ids) for prompt in prompts)
    assert "look_up" in declared
    assert "<|tool_call_begin|>c1<|tool_call_argument_begin|>{}<|tool_call_end|>" in called


def test_tools_a_template_leaves_out_are_refused_unless_told_to_ignore_them() -> None:
    record = {**chat("Hi"), "tools": TOOLS}
    assert made(SMOLLM2, record)[1] == ["tools_ignored"]
    prompts, refused = made(SMOLLM2, record, tools="ignore")
    assert (len(prompts), refused) == (1, [])


def test_tools_shown_only_sometimes_are_looked_for_in_each_record(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if tools and messages|length == 1 %}{{ tools | tojson }}{% endif %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    directory = with_template(template, tmp_path)
    spoken_of = {**chat("what does look_up do?", "No idea", "Really?"), "tools": TOOLS}
    assert made(directory, {**chat("Hi"), "tools": TOOLS}, spoken_of)[1] == ["tools_ignored"]


@pytest.mark.parametrize(
    "calls", [[CALL], [CALL, {**CALL, "id": "c2", "function": {"name": "other", "arguments": "{}"}}]]
)
def test_calls_a_template_leaves_out_are_refused(tmp_path: Path, calls: list[Any]) -> None:
    """All of them left out, or all but the first."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        + ("{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}" if len(calls) > 1 else "")
        + "\n{% endfor %}{{ tools | tojson }}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    turns = [CALLED["messages"][0], {**CALLED["messages"][1], "tool_calls": calls}, CALLED["messages"][2]]
    record = {"messages": turns, "tools": TOOLS}
    assert made(with_template(template, tmp_path), record)[1] == ["tool_calls_ignored"]


def test_what_a_template_raises_is_told(tmp_path: Path) -> None:
    directory = with_template("{{ raise_exception('roles must alternate') }}", tmp_path)
    (refused,) = maker(directory).render(lines(chat("Hi")))
    assert isinstance(refused, Refused)
    assert str(refused.reject) == "template_error: TemplateError: roles must alternate"


def test_a_conversation_rendered_to_nothing_is_refused(tmp_path: Path) -> None:
    assert made(with_template("{{ '' }}", tmp_path), chat("Hi"))[1] == ["empty_prompt"]


@pytest.mark.parametrize(
    ("asks", "message"),
    [
        ({"enable_thinking": False}, "never reads chat_template_kwargs.enable_thinking"),
        ({"tools": []}, "or it is given by tokenhaul"),
    ],
)
def test_a_switch_the_template_does_not_know_names_those_it_does(asks: dict[str, Any], message: str) -> None:
    with pytest.raises(Fatal) as caught:
        maker(KIMI, chat_template_kwargs=asks)
    assert message in str(caught.value)
    assert "the switches this template reads: thinking, tools_ts_str" in str(caught.value)


def test_every_part_of_a_request_is_part_of_its_hash(tmp_path: Path) -> None:
    tags = {"open": "<think>", "close": "</think>"}
    variants: list[dict[str, Any]] = [
        {},
        {"max_new_tokens": 65},
        {"samples": 2},
        {"format": "messages"},
        {"tools": "ignore"},
        {"sampling": {"temperature": 0.5}},
        {"reasoning": "none"},
        {"chat_template_kwargs": {"thinking": False}},
        {"context": 1000},
    ]
    hashes = [maker(KIMI, **variant).request.settings for variant in variants]
    hashes.append(maker(SMOLLM2).request.settings)
    template = (KIMI / "chat_template.jinja").read_text() + " "
    hashes.append(maker(with_template(template, tmp_path)).request.settings)
    assert len(set(hashes)) == len(hashes)
    same: list[dict[str, Any]] = [
        {"name": "other"},
        {"files": ["o.jsonl"]},
        {"revision": 3},
        {"sampling": {}},
        {"reasoning": tags},
    ]
    assert {maker(KIMI, **variant).request.settings for variant in same} == {hashes[0]}


def test_fingerprints_cover_files_and_kwargs(tmp_path: Path) -> None:
    prints = {tokenizer(KIMI).fingerprint({}), tokenizer(KIMI).fingerprint({"thinking": False})}
    shutil.copytree(KIMI, tmp_path / "same")
    assert ChatTokenizer(tmp_path / "same").fingerprint({}) in prints
    (tmp_path / "same" / "special_tokens_map.json").write_text("{}")
    prints.add(ChatTokenizer(tmp_path / "same").fingerprint({}))
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("template", "asks", "state"),
    [
        ("{{ messages[0].content + '<think>\\n' }}", "auto", Reasoning([163606], [163607], opened=True)),
        ("{{ messages[0].content + '<think>\\n\\n</think>\\n\\n' }}", "auto", Reasoning([163606], [163607])),
        ("{{ messages[0].content }}", "auto", Reasoning([163606], [163607])),
        ("{{ messages[0].content }}<think>", "none", None),
        ("{{ messages[0].content }}[[", {"open": "[[", "close": "]]"}, "opened"),
    ],
)
def test_the_state_of_reasoning(tmp_path: Path, template: str, asks: Any, state: Any) -> None:
    directory = with_template(template, tmp_path)
    ((prompt,), _) = made(directory, chat("Hi"), reasoning=asks)
    if state == "opened":
        state = Reasoning(tokenizer(directory).ids("[["), tokenizer(directory).ids("]]"), opened=True)
    assert prompt.reasoning is None or (
        msgspec.structs.replace(prompt.reasoning, open_variants=[], close_variants=[]) == state
    )
    assert (prompt.reasoning is None) == (state is None)


def test_a_model_that_knows_no_tags_has_no_reasoning() -> None:
    assert made(SMOLLM2, chat("Hi <think>"))[0][0].reasoning is None


def test_tags_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(Fatal, match=r"reasoning\.close: ids \[49152\] are beyond vocab_size 49152"):
        maker(SMOLLM2, reasoning={"open": [1], "close": [49152]})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer can be loaded"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template: put chat_template.jinja there"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path, spoil: Any, message: str) -> None:
    shutil.copytree(SMOLLM2, tmp_path / "t")
    spoil(tmp_path / "t")
    with pytest.raises(Fatal) as caught:
        ChatTokenizer(tmp_path / "t")
    assert f"TOKENHAUL_INGEST_TOKENIZER {tmp_path / 't'}" in str(caught.value)
    assert message in str(caught.value)


def test_preflight_looks_at_records_from_the_start_and_passes_over_refused_ones(tmp_path: Path) -> None:
    records = [{"broken": 1}] * 40 + [chat(f"Hi {n}") for n in range(40)]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert (
        preflight.prove_source(
            maker(SMOLLM2), Source(name="s", files=["s.jsonl"], max_new_tokens=1), Sources(tmp_path, [])
        )
        == preflight.RECORDS
    )


def test_preflight_stops_when_the_two_ways_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    used = maker(SMOLLM2)
    monkeypatch.setattr(ChatTokenizer, "encode", lambda self, texts: [[1, 2, 3] for _ in texts])
    with pytest.raises(Fatal, match=r"source 's': s\.jsonl, line 1: encoding the rendered text gives other ids"):
        preflight.prove(used, "s.jsonl", lines(chat("Hi")))


def test_preflight_stops_without_a_generation_prompt(tmp_path: Path) -> None:
    directory = with_template("{% for m in messages %}{{ m.content }}\n{% endfor %}", tmp_path)
    with pytest.raises(Fatal, match=r"add_generation_prompt adds nothing to the rendered prompt \(a user's turn\)"):
        preflight.prove_template(maker(directory))


def test_preflight_stops_where_a_record_gets_no_generation_prompt(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and messages|length == 1 %}A:{% endif %}"
    )
    directory = with_template(template, tmp_path)
    preflight.prove(maker(directory), "s.jsonl", lines(chat("Hi")))
    with pytest.raises(Fatal, match=r"adds nothing to the rendered prompt \(s\.jsonl, line 2\)"):
        preflight.prove(maker(directory), "s.jsonl", lines(chat("Hi"), chat("Hi", "Ho", "More")))


def test_preflight_names_a_template_that_renders_nobody(tmp_path: Path) -> None:
    directory = with_template("{{ raise_exception('never') }}", tmp_path)
    with pytest.raises(Fatal, match="cannot render a user's turn: TemplateError: never"):
        preflight.prove_template(maker(directory))
