"""Real tokenizers of six families: every shipped prompt has the ids plain transformers gives it one by one, or the
chat template must refuse it and it is refused. Run by `make test-tokenizers`."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard
from transformers import AutoTokenizer

from schemas.prompts import Prompt
from schemas.sequences import reasoning_end
from services.ingest import preflight
from services.ingest.lines import Line
from services.kernel.codec import Decoder
from tests.support.ingest import KIMI, SMOLLM2, chat, lines, maker

CACHE = Path(os.environ["TEST_TOKENIZERS"])
# Vocabulary and context as in each model's config.json, which the packages leave out.
MODELS: dict[str, tuple[Path, dict[str, Any]]] = {
    "qwen3": (CACHE / "qwen3", {"vocab": 151936, "context": 40960}),
    "deepseek_v3": (CACHE / "deepseek_v3", {"vocab": 129280, "context": 163840}),
    "llama3_1": (CACHE / "llama3_1", {"vocab": 128256, "context": 131072}),
    "gemma3": (CACHE / "gemma3", {"vocab": 262208, "context": 131072}),
    "smollm2": (SMOLLM2, {}),
    "kimi-like": (KIMI, {}),
}
PROMPTS = ["alpaca", "code_input_output", "glaive_raw", "openai_messages", "openai_tools", "sharegpt_tools"]
READ_TOOLS = ("qwen3", "kimi-like")
# <mask> is a control token of Gemma's, and two instructions are to fill it in.
MUST_REFUSE = {("gemma3", "alpaca"): {"control_token": 2}}
NO_TOOLS = [name for name in MODELS if name not in READ_TOOLS]
TOOL_FILES = ("openai_tools", "sharegpt_tools", "glaive_raw")
USER = {"role": "user", "content": "Hi"}
CALLED = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
]


@cache
def plain(name: str) -> Any:
    return AutoTokenizer.from_pretrained(MODELS[name][0])


def model(name: str, **asks: Any) -> Any:
    directory, facts = MODELS[name]
    return maker(directory, **facts, **asks)


def differing(name: str, prompts: Iterator[Prompt]) -> list[Any]:
    """Prompts whose ids are not what plain transformers gives for their messages."""
    found = []
    for prompt in prompts:
        assert prompt.messages is not None
        tools = json.loads(prompt.tools) if prompt.tools else None
        wanted = plain(name).apply_chat_template(
            json.loads(prompt.messages), tools=tools, add_generation_prompt=True, return_dict=False,
            **prompt.chat_template_kwargs,
        )  # fmt: skip
        if prompt.prompt_ids != wanted:
            found.append(prompt.source_ref)
    return found


def decoded(made: Any) -> Iterator[Prompt]:
    return (Decoder(Prompt).decode(ready.value) for ready in made.prompts)


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    yield counts
    print(f"\n{counts['prompts']} prompts equal to plain transformers, {counts['refused']} refused as they must be")


@pytest.mark.parametrize("turns", ["last", "each"])
@pytest.mark.parametrize("stem", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_plain_transformers(totals: Counter[str], name: str, stem: str, turns: str) -> None:
    if turns == "each" and stem not in ("sharegpt_tools", "glaive_raw"):
        return  # they have one turn
    data = zstandard.decompress((Path(__file__).parent / "prompts" / f"{stem}.jsonl.zst").read_bytes())
    rows = [Line(row, line) for row, line in enumerate(data.splitlines(), 1)]
    used = model(name, turns=turns)
    assert preflight.prove(used, f"{stem}.jsonl", rows[: preflight.RECORDS]) >= 0
    made = used.make(f"{stem}.jsonl", rows)
    assert differing(name, decoded(made)) == []
    if stem in TOOL_FILES and name in NO_TOOLS:
        assert made.prompts == []
        assert sum(made.refused.values()) >= len(rows)
        assert set(made.refused) <= {"tools_ignored", "template_error", "turn_ignored"}
    else:
        assert dict(made.refused) == MUST_REFUSE.get((name, stem), {})
        assert len(made.prompts) + sum(made.refused.values()) >= len(rows)
    totals.update(prompts=len(made.prompts), refused=sum(made.refused.values()))
    print(f"\n{name} {stem} {turns}: {len(made.prompts)} prompts equal, refused {dict(made.refused)}", end="")


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("gemma3", {"messages": [USER, USER]}, "template_error"),
        ("gemma3", {"messages": CALLED}, "template_error"),
        *((name, {"messages": [USER], "tools": [{"name": "f"}]}, "tools_ignored") for name in NO_TOOLS),
        ("smollm2", {"messages": CALLED}, "tool_calls_ignored"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_ask_is_refused(name: str, record: dict[str, Any], reason: str) -> None:
    assert dict(model(name).make("s.jsonl", lines(record)).refused) == {reason: 1}


@pytest.mark.parametrize("name", MODELS)
def test_control_tokens_become_ids_and_are_refused(name: str) -> None:
    token = next(t for t in sorted(plain(name).all_special_tokens) if t.isascii() or name == "deepseek_v3")
    record = chat(f"What is {token} for?")
    assert dict(model(name).make("s.jsonl", lines(record)).refused) == {"control_token": 1}
    (prompt,) = decoded(model(name, control_tokens="allow").make("s.jsonl", lines(record)))
    without = next(decoded(model(name).make("s.jsonl", lines(chat("What is  for?")))))
    id = plain(name).convert_tokens_to_ids(token)
    assert prompt.prompt_ids.count(id) == without.prompt_ids.count(id) + 1


@pytest.mark.parametrize("name", ["llama3_1", "gemma3"])
def test_bos_stands_once_where_encoding_the_text_alone_would_write_two(name: str) -> None:
    (item,) = model(name).render(lines(chat("Hi")))
    bos = plain(name).bos_token_id
    assert plain(name)(item.text)["input_ids"][:2] == [bos, bos]
    (prompt,) = decoded(model(name).make("s.jsonl", lines(chat("Hi"))))
    assert prompt.prompt_ids[0] == bos != prompt.prompt_ids[1]


def test_qwen3_thinks_by_itself_or_not_at_all() -> None:
    used = model("qwen3")
    (prompt,) = decoded(used.make("s.jsonl", lines(chat("Hi"))))
    assert prompt.reasoning is not None
    assert (prompt.reasoning.open, prompt.reasoning.close, prompt.reasoning.opened) == ([151667], [151668], False)
    ids = used.tokenizer.ids("<think>\nhm\n</think>\n\nHo<|im_end|>")
    end = reasoning_end(prompt.prompt_ids, ids, prompt.reasoning)
    assert end is not None
    assert (prompt.prompt_ids + ids)[end] == 151668
    off = model("qwen3", chat_template_kwargs={"enable_thinking": False})
    (prompt,) = decoded(off.make("s.jsonl", lines(chat("Hi"))))
    assert off.tokenizer.decode(prompt.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert reasoning_end(prompt.prompt_ids, used.tokenizer.ids("Ho<|im_end|>"), prompt.reasoning) is None


@pytest.mark.parametrize("before", ["hm", "hm.", "hm\n", "(hm)", "哈。"])
@pytest.mark.parametrize("after", ["\n\nHo", "\nHo", "Ho", " Ho"])
def test_deepseek_v3s_tag_of_three_ids_is_found_whatever_stands_beside_it(before: str, after: str) -> None:
    used = model("deepseek_v3", reasoning={"open": "<think>", "close": "</think>"})
    (prompt,) = decoded(used.make("s.jsonl", lines(chat("Hi"))))
    assert prompt.reasoning is not None
    assert len(prompt.reasoning.close) == 3
    ids = used.tokenizer.ids(f"<think>\n{before}</think>{after}")
    end = reasoning_end(prompt.prompt_ids, ids, prompt.reasoning)
    assert end is not None
    answer = ids[: end - len(prompt.prompt_ids) + 1]
    assert "</think>" in used.tokenizer.decode(answer)
    assert "</think>" not in used.tokenizer.decode(answer[:-1])


def test_gpt_oss_reasons_in_a_channel(tmp_path: Path) -> None:
    directory = shutil.copytree(CACHE / "gptoss", tmp_path / "gptoss")
    # Its package has no template; this is the frame of OpenAI's.
    (directory / "chat_template.jinja").write_text(
        "<|start|>system<|message|>Today is {{ strftime_now('%Y-%m-%d') }}<|end|>"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    used = maker(directory, vocab=201088, context=131072)
    (prompt,) = decoded(used.make("s.jsonl", lines(chat("Hi"))))
    assert "Today is 2026-07-26" in used.tokenizer.decode(prompt.prompt_ids)
    assert prompt.reasoning is not None
    assert prompt.reasoning.open[0] == 200005
    assert prompt.reasoning.close == [200007]
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Ho<|return|>"
    ids = used.tokenizer.ids(text)
    end = reasoning_end(prompt.prompt_ids, ids, prompt.reasoning)
    assert end is not None
    assert used.tokenizer.decode(ids[: end - len(prompt.prompt_ids) + 1]) == text.split("<|start|>")[0]
