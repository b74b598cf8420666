"""Texts that must not be trained on, and whether a text holds one of them: exactly, or as a run of its words.

Benchmarks are given as files. A text overlaps when, white space, case and punctuation aside, it is one of theirs or
shares `words` words in a row with one. Runs that many texts of a file share are its template ("Complete the following
function ..."), not its content, and count for nothing.
"""

from __future__ import annotations

import gzip
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import zstandard

from services.kernel.errors import SettingsError

WORDS = 13
"""Words in a row that make an overlap, as in GPT-3's decontamination."""

SHARED_BY = 10
"""A run of words in more texts of a file than this is the file's template."""

TEXT_KEYS = ("prompt", "text", "question", "problem", "query", "instruction", "input", "turns")
CHAT_KEYS = ("messages", "conversations")
SUFFIXES = (".jsonl", ".txt")

# A character of a script that is written without spaces is a word of its own.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Match(msgspec.Struct, frozen=True):
    """Which text was found: its file and line, and whether whole or as a run of words."""

    file: str
    row: int
    how: Literal["exact", "words"]

    def __str__(self) -> str:
        return f"{self.file}, line {self.row} ({'the same text' if self.how == 'exact' else 'words in a row'})"


class Overlap:
    """The texts of some files. Threads may share it; about 100 bytes for each of their words."""

    def __init__(self, words: int = WORDS) -> None:
        self._words = words
        self._whole: dict[int, tuple[str, int]] = {}
        self._runs: dict[int, tuple[str, int]] = {}

    @classmethod
    def load(cls, paths: Iterable[Path], words: int = WORDS) -> Overlap:
        """Read files of one text or record a line. Raises SettingsError for what holds no text: nothing is passed over
        silently, because a benchmark that was not read looks like one that does not match."""
        overlap = cls(words)
        for path in paths:
            overlap.add(str(path), read(path))
        return overlap

    def add(self, file: str, texts: Iterable[tuple[int, str]]) -> None:
        """The texts of one file, each with its line."""
        runs: dict[int, tuple[str, int]] = {}
        shared: Counter[int] = Counter()
        for row, text in texts:
            words = _WORD.findall(text.casefold())
            if not words:
                continue
            self._whole.setdefault(hash(tuple(words)), (file, row))
            own = set(self._hashes(words))
            shared.update(own)
            for run in own:
                runs.setdefault(run, (file, row))
        for run, count in shared.items():
            if count <= SHARED_BY:
                self._runs.setdefault(run, runs[run])

    def find(self, texts: Iterable[str]) -> Match | None:
        """The first of `texts` that overlaps, by what."""
        for text in texts:
            words = _WORD.findall(text.casefold())
            if not words:
                continue
            if found := self._whole.get(hash(tuple(words))):
                return Match(*found, "exact")
            for run in self._hashes(words):
                if found := self._runs.get(run):
                    return Match(*found, "words")
        return None

    def _hashes(self, words: Sequence[str]) -> Iterator[int]:
        # 64 bits of one process: with a million runs, one wrong match in 10^13 runs looked up.
        size = self._words
        return (hash(tuple(words[start : start + size])) for start in range(len(words) - size + 1))


def read(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a .jsonl or .txt file, also .gz or .zst. Raises SettingsError naming the file and the line."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if not name.endswith(SUFFIXES):
        raise SettingsError(f"{path}: texts to keep out are read from {' or '.join(SUFFIXES)} files (.gz and .zst too)")
    count = 0
    try:
        with _open(path) as lines:
            for row, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                for text in [line] if name.endswith(".txt") else _texts_of_line(path, row, line):
                    yield row, text
                    count += 1
    except (OSError, EOFError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if not count:
        raise SettingsError(f"{path} holds no text to keep out")


def texts_of(record: Any) -> list[str]:
    """The texts a record asks with: those under TEXT_KEYS, and the turns of its user under CHAT_KEYS."""
    if isinstance(record, str):
        return [record]
    if not isinstance(record, dict):
        return []
    texts: list[str] = []
    for key in TEXT_KEYS:
        value = record.get(key)
        texts += [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if isinstance(record.get("instruction"), str) and isinstance(record.get("input"), str):
        texts.append(f"{record['instruction']}\n{record['input']}")
    for key in CHAT_KEYS:
        turns = record.get(key)
        texts += user_texts(turns) if isinstance(turns, list) else []
    return [text for text in texts if text.strip()]


def user_texts(turns: Iterable[Any]) -> list[str]:
    """What the user says in turns of role and content, or from and value."""
    texts: list[str] = []
    for turn in turns:
        if isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("user", "human"):
            content = turn.get("content", turn.get("value"))
            parts = content if isinstance(content, list) else [content]
            found = [part.get("text") if isinstance(part, dict) else part for part in parts]
            texts.append("".join(text for text in found if isinstance(text, str)))
    return texts


def _texts_of_line(path: Path, row: int, line: str) -> list[str]:
    try:
        texts = texts_of(msgspec.json.decode(line))
    except (msgspec.DecodeError, RecursionError) as error:
        raise SettingsError(f"{path}, line {row}: cannot be read as JSON: {error}") from error
    if not texts:
        keys = ", ".join((*TEXT_KEYS, *CHAT_KEYS))
        raise SettingsError(f"{path}, line {row}: no text to keep out under any of {keys}")
    return texts


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        return io.TextIOWrapper(zstandard.open(path, "rb"), encoding="utf-8")
    return path.open(encoding="utf-8")
