"""The model's tokenizer: conversations to text by its own chat template, texts to ids by its Rust half.

Every default of transformers is passed explicitly: they have changed between versions, and a changed default would be
another prompt. Rendered text is encoded without special tokens, because the template has written them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import meta

from services.kernel.errors import Fatal, Reject

_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_canonical = msgspec.msgpack.Encoder(order="sorted")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class ChatTokenizer:
    """A fast (Rust) tokenizer with its chat template. Threads may share it."""

    def __init__(self, directory: str) -> None:
        """Raises Fatal, saying what to do, for a tokenizer that cannot be used. Takes seconds: not on the loop."""
        from transformers import AutoTokenizer  # takes seconds too, which `tokenhaul --help` should not

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises nearly everything for a directory it cannot read
            raise Fatal(f"TOKENHAUL_INGEST_TOKENIZER {directory}: no tokenizer can be loaded: {error}") from error
        if not self._tokenizer.is_fast:
            raise Fatal(
                f"TOKENHAUL_INGEST_TOKENIZER {directory}: {type(self._tokenizer).__name__} is a slow tokenizer; "
                "a directory with a tokenizer.json is needed"
            )
        if not self._tokenizer.chat_template:
            raise Fatal(f"TOKENHAUL_INGEST_TOKENIZER {directory}: no chat template: put chat_template.jinja there")
        self._rust = self._tokenizer._tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        templates = self._tokenizer.chat_template
        self.templates: list[str] = list(templates.values()) if isinstance(templates, dict) else [templates]
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.added_tokens: frozenset[str] = frozenset(self._tokenizer.get_added_vocab())
        self._special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        self._files = _hash_files(Path(directory), _canonical.encode(templates))

    def render(
        self, messages: Messages, tools: Tools, kwargs: Mapping[str, Any], *, generation_prompt: bool = True
    ) -> str:
        """The text of a prompt. Raises Reject("template_error") with what the template said."""
        try:
            return str(self._apply(messages, tools, kwargs, tokenize=False, generation_prompt=generation_prompt))
        except Exception as error:  # a template is a program: it can raise anything, and means this record
            raise Reject("template_error", f"{type(error).__name__}: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered texts, all at once."""
        if self._rust.truncation is not None or self._rust.padding is not None:
            raise Fatal("the tokenizer was told to truncate or pad: the ids would not be those of the text")
        return [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def plain(self, messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> list[int]:
        """The ids of a prompt as plain transformers gives them: slower, and what `encode` is held against."""
        return list(self._apply(messages, tools, kwargs, tokenize=True, generation_prompt=True))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._rust.decode(list(ids), skip_special_tokens=False))

    def control_tokens(self, tags: Iterable[str]) -> frozenset[str]:
        """Tokens that steer: the special ones, and of the other added ones those the template writes and `tags`."""
        written = {token for token in self.added_tokens if token.strip() and any(token in t for t in self.templates)}
        return frozenset(self._special | written | (self.added_tokens & set(tags)))

    def fingerprint(self, kwargs: Mapping[str, Any]) -> str:
        """Of all that makes a prompt of a conversation: the tokenizer's files, the template and its kwargs."""
        return blake2b(self._files + _canonical.encode(kwargs), digest_size=16).hexdigest()

    def template_variables(self) -> set[str]:
        """What the chat template asks for from outside: messages, tools and its switches."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        names: set[str] = set()
        for template in self.templates:
            environment = _compile_jinja_template(template).environment
            names |= meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals)
        return names - set(self._tokenizer.special_tokens_map)

    def _apply(
        self, messages: Messages, tools: Tools, kwargs: Mapping[str, Any], *, tokenize: bool, generation_prompt: bool
    ) -> Any:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            documents=None,
            chat_template=None,
            add_generation_prompt=generation_prompt,
            continue_final_message=False,
            tokenize=tokenize,
            sanitize_control_tokens=False,
            padding=False,
            truncation=False,
            max_length=None,
            return_tensors=None,
            return_dict=False,
            return_assistant_tokens_mask=False,
            tokenizer_kwargs=None,
            **kwargs,
        )


def _hash_files(directory: Path, templates: bytes) -> bytes:
    """One hash over the tokenizer's files by name, and its templates as they were loaded."""
    total = blake2b(templates, digest_size=16)
    for name in _FILES:
        if (directory / name).is_file():
            total.update(name.encode() + b"\0" + blake2b((directory / name).read_bytes()).digest())
    return total.digest()
