"""Where a model's tokenizer is, how it is loaded, and what is said when it cannot be."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal

_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_CODE = "*.py"
_OF_THE_MODEL = ("config.json", "generation_config.json")
_VARIABLE = "TOKENHAUL_INGEST_TOKENIZER"

_FIXES = (
    (
        re.compile(r"trust_remote_code|custom code"),
        "it comes with Python code of its own: read it, and set TOKENHAUL_INGEST_TRUST_REMOTE_CODE=true to run it",
    ),
    (
        re.compile(r"No module named|packages that were not found|requires the following packages"),
        "its code needs packages that are not installed: for Kimi they come with `pip install 'tokenhaul[kimi]'`",
    ),
    (
        re.compile(r"cannot import name 'bytes_to_unicode'"),
        "its code was written for transformers 4: take the newer tokenization file of the model's repository, or let "
        "it import bytes_to_unicode from transformers.convert_slow_tokenizer",
    ),
)
"""What to do about the ways in which loading fails."""


def locate(settings: IngestSettings) -> Path:
    """The directory with the tokenizer's files, those of the model beside them; from the hub if it is an id. Raises
    Fatal when the hub does not give them."""
    if Path(settings.tokenizer).is_dir():
        return Path(settings.tokenizer)
    import huggingface_hub  # takes a moment, which `tokenhaul --help` should not

    wanted = [*_FILES, *_OF_THE_MODEL, *([_CODE] if settings.trust_remote_code else [])]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                settings.tokenizer,
                revision=settings.tokenizer_revision,
                cache_dir=settings.tokenizer_cache or None,
                allow_patterns=wanted,
            )
        )
    except Exception as error:  # the hub's client and the network below it raise many kinds
        raise Fatal(
            f"{_VARIABLE}={settings.tokenizer} at {settings.tokenizer_revision} cannot be had from the hub: {error}"
        ) from error


def load(directory: Path, *, trust_remote_code: bool) -> Any:
    """transformers' tokenizer. Raises Fatal, saying what to do. Takes seconds."""
    from transformers import AutoTokenizer  # takes seconds too

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly everything for a directory it cannot read
        said = " ".join(str(error).split())
        fix = next((f" What helps: {fix}" for sign, fix in _FIXES if sign.search(said)), "")
        raise Fatal(f"{_VARIABLE} {directory}: no tokenizer can be loaded: {said}{fix}") from error


def fingerprint(directory: Path, templates: bytes, *, with_code: bool) -> bytes:
    """One hash over the tokenizer's files by name, its code if that is run, and its templates as they were loaded."""
    total = blake2b(templates, digest_size=16)
    names = [name for name in _FILES if (directory / name).is_file()]
    for name in names + (sorted(path.name for path in directory.glob(_CODE)) if with_code else []):
        total.update(name.encode() + b"\0" + blake2b((directory / name).read_bytes()).digest())
    return total.digest()
