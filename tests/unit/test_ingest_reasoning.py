"""Where reasoning ends is found from ids alone, for every way in which model families write it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from schemas.prompts import Prompt
from schemas.sequences import reasoning_end
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal
from tests.support.ingest import KIMI, SMOLLM2, chat, lines, maker

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OFF = "{% if enable_thinking is defined and not enable_thinking %}"
QWEN = f"<|im_start|>assistant\n{OFF}<think>\n\n</think>\n\n{{% endif %}}"
GLM = f"<|assistant|>{OFF}\n<think></think>{{% endif %}}"
V31 = "<|im_start|>assistant{% if thinking %}<think>{% else %}</think>{% endif %}"
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
THINK = ["<think>", "</think>"]
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"


def model(folder: Path, tail: str, added: list[str]) -> Path:
    """SmolLM2's vocabulary with more tokens, as families have them, and a template that ends with `tail`."""
    directory = folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.add_tokens(added)
    tokenizer.chat_template = f"{TURN}{{% if add_generation_prompt %}}{tail}{{% endif %}}"
    tokenizer.save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(SMOLLM2 / name, directory)
    return directory


@pytest.mark.parametrize(
    ("tail", "added", "asks", "output", "opened", "close"),
    [
        ("<|im_start|>assistant\n<think>\n", THINK, {}, "hm\n</think>\n\n4", True, "</think>"),
        (V31, THINK, {"chat_template_kwargs": {"thinking": True}}, "hm</think>4", True, "</think>"),
        (V31, THINK, {}, "4", False, None),
        (QWEN, THINK, {}, "<think>\nhm\n</think>\n\n4", False, "</think>"),
        (QWEN, THINK, {"chat_template_kwargs": {"enable_thinking": False}}, "4", False, None),
        (QWEN, THINK, {}, "4", False, None),
        (GLM, THINK, {}, "\n<think>hm</think>\n4", False, "</think>"),
        (GLM, THINK, {"chat_template_kwargs": {"enable_thinking": False}}, "4", False, None),
        ("<|start|>assistant", HARMONY, {}, THOUGHT, False, "<|end|>"),
        ("<|start|>assistant", HARMONY, {}, THOUGHT[THOUGHT.index("<|channel|>final") :], False, None),
        (
            "<|im_start|>assistant\n", [], {"reasoning": {"open": "<think>", "close": "</think>"}},
            "<think> hm </think> 4", False, "</think>",
        ),
        ("[THINK]", ["[THINK]", "[/THINK]"], {}, "hm[/THINK]4", True, "[/THINK]"),
    ],
    ids=[
        "R1", "V3.1", "V3.1 without", "Qwen3", "Qwen3 without", "Qwen3 that does not think", "GLM", "GLM without",
        "gpt-oss", "gpt-oss that does not think", "V3, three ids", "Magistral",
    ],
)  # fmt: skip
def test_families(
    tmp_path: Path, tail: str, added: list[str], asks: dict[str, Any], output: str, opened: bool, close: str | None
) -> None:
    directory = model(tmp_path, tail, added)
    used = maker(directory, vocab=49200, **asks)
    (ready,) = used.make("s.jsonl", lines(chat("What is 2 and 2?"))).prompts
    prompt = Decoder(Prompt).decode(ready.value)
    assert prompt.reasoning is not None
    assert prompt.reasoning.opened is opened
    if not added:
        assert len(prompt.reasoning.close) > 1
    ids = used.tokenizer.ids(output)
    end = reasoning_end(prompt.prompt_ids, ids, prompt.reasoning)
    if close is None:
        assert end is None
    else:
        assert end is not None
        row = prompt.prompt_ids + ids
        assert used.tokenizer.decode(row[: end + 1]).endswith(f"hm\n{close}" if "\n</" in output else close)
        assert close not in used.tokenizer.decode(row[len(prompt.prompt_ids) : end])
        unclosed = ids[: end - len(prompt.prompt_ids)]
        assert reasoning_end(prompt.prompt_ids, unclosed, prompt.reasoning) == -1


def test_tags_given_as_ids_must_be_what_the_tokenizer_writes() -> None:
    written = maker(SMOLLM2).tokenizer.ids("</think>")
    alone = [[id] for id in written]
    spelled = [maker(SMOLLM2).tokenizer.ids(character)[0] for character in "</think>"]
    assert spelled != written
    with pytest.raises(Fatal) as caught:
        maker(SMOLLM2, reasoning={"open": alone[0], "close": spelled})
    assert f"reasoning.close: the ids {spelled} read '</think>', which the tokenizer writes as {written}" in str(
        caught.value
    )


@pytest.mark.parametrize("before", ["", "hm", "hm.", "hm\n", "hm. "])
@pytest.mark.parametrize("after", ["", "\n\n", " so 4", "4"])
def test_a_tag_of_several_ids_is_found_where_it_merges_with_what_stands_beside_it(before: str, after: str) -> None:
    tag = "[/x]"
    used = maker(KIMI, reasoning={"open": "[x]", "close": tag})
    (ready,) = used.make("s.jsonl", lines(chat("Hi"))).prompts
    prompt = Decoder(Prompt).decode(ready.value)
    ids = used.tokenizer.ids(f"[x]\n{before}{tag}{after}")
    end = reasoning_end(prompt.prompt_ids, ids, prompt.reasoning)
    assert end is not None
    answer = ids[: end - len(prompt.prompt_ids) + 1]
    assert tag in used.tokenizer.decode(answer)
    assert tag not in used.tokenizer.decode(answer[:-1])
