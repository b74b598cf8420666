"""What belongs to a benchmark is found, what only resembles it is not, and a file that cannot be read says so."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from services.kernel.errors import SettingsError
from services.kernel.overlap import SHARED_BY, Match, Overlap
from tests.support.ingest import PROMPTS

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?"
)


def overlap(*texts: str, words: int = 13) -> Overlap:
    made = Overlap(words)
    made.add("bench", enumerate(texts, 1))
    return made


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (QUESTION, "exact"),
        (QUESTION.upper().replace(",", "").replace(" ", "\n "), "exact"),
        (f"Solve this. {QUESTION[:100]} Thank you!", "words"),
        ("and then she sold half as many clips in May. How many clips", "words"),
        ("then she sold half as many clips in May. How many clips", None),
        ("How many clips did Natalia sell? She sold half as many in May as in April, and 48 in April.", None),
        ("", None),
    ],
)
def test_the_same_text_and_thirteen_words_in_a_row_overlap(text: str, how: Any) -> None:
    found = overlap("What is 6 times 7?", QUESTION).find(["Hi", text])
    assert found == (Match("bench", 2, how) if how else None)


def test_a_short_text_is_found_alone_only() -> None:
    used = overlap("What is 6 times 7?")
    assert used.find(["what is 6 times 7"]) == Match("bench", 1, "exact")
    assert used.find(["Tell me: what is 6 times 7? Explain."]) is None


def test_scripts_without_spaces_have_words_too() -> None:
    used = overlap("小明有十二个苹果他给了小红五个苹果请问小明还剩几个苹果")
    assert used.find(["题目:小明有十二个苹果,他给了小红五个苹果。"]) == Match("bench", 1, "words")
    assert used.find(["小明有十二个苹果"]) is None


def test_words_that_many_texts_share_are_the_template_of_the_file() -> None:
    intro = "Complete the following Python function and return nothing but the code of the whole function please"
    names = [f"{intro}: def f{n}()" for n in range(SHARED_BY + 1)]
    assert overlap(*names).find([f"{intro}: def something_else()"]) is None
    assert overlap(*names[:2]).find([f"{intro}: def something_else()"]) == Match("bench", 1, "words")


@pytest.mark.parametrize(
    "record",
    [
        QUESTION,
        {"prompt": QUESTION},
        {"question": QUESTION, "answer": "72"},
        {"turns": [QUESTION, "More"]},
        {"instruction": "Solve", "input": QUESTION},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": QUESTION}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": "72"}]},
    ],
)
def test_records_of_every_shape_are_read(tmp_path: Path, record: Any) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_bytes(b'{"prompt": "Another"}\n\n' + msgspec.json.encode(record) + b"\n")
    found = Overlap.load([path]).find([QUESTION])
    assert found == Match(str(path), 3, "exact")
    assert str(found) == f"{path}, line 3 (the same text)"


def test_text_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"Another\n{QUESTION}\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"Packed with gzip\n"))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "Packed with zstd"}\n'))
    used = Overlap.load([tmp_path / "a.txt", tmp_path / "b.txt.gz", tmp_path / "c.jsonl.zst"])
    assert [used.find([text]) is not None for text in (QUESTION, "packed with gzip", "packed with zstd")] == [True] * 3


def test_every_prompt_of_a_file_is_found_in_itself() -> None:
    file = next(file for file in PROMPTS if file.stem == "openai_messages")
    used = Overlap.load([file])
    for line in file.read_bytes().splitlines():
        turns = msgspec.json.decode(line)["messages"]
        assert used.find([turn["content"] for turn in turns if turn["role"] == "user"])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("b.csv", b"x", r"b\.csv: texts to keep out are read from \.jsonl or \.txt files"),
        ("b.jsonl", b'{"prompt": "a"}\n{broken', r"b\.jsonl, line 2: cannot be read as JSON"),
        ("b.jsonl", b'{"answer": "a"}\n', r"b\.jsonl, line 1: no text to keep out under any of prompt, text, question"),
        ("b.jsonl", b"\n", r"b\.jsonl holds no text to keep out"),
        ("b.txt", b"\xff", r"b\.txt cannot be read"),
        ("b.txt.gz", b"not gzip", r"b\.txt\.gz cannot be read"),
        ("b.txt.zst", b"not zstd", r"b\.txt\.zst cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SettingsError, match=message):
        Overlap.load([tmp_path / name])
    with pytest.raises(SettingsError, match="cannot be read"):
        Overlap.load([tmp_path / "missing.txt"])
