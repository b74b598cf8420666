"""The model's tokenizer: conversations to text by its own chat template, texts to ids by its Rust half.

Every default of transformers is passed explicitly: they have changed between versions, and a changed default would be
another prompt. Rendered text is encoded without special tokens, because the template has written them already.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import meta

from services.ingest import slow, tokenizer_files
from services.ingest.sandbox import quicken
from services.ingest.slow import SlowEncoder
from services.kernel.errors import Fatal, Reject
from services.kernel.rendering import DATE, fix_date, with_date

# Parameters of apply_chat_template that are no switches of a template.
_TRANSFORMERS = {
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens", "kwargs",
}  # fmt: skip
# Words whose ids the tokenizer remembers, some 10 MB. With its own 10,000 it spends a tenth more on English and code.
_CACHED_WORDS = 100_000
# Characters encoded in one go. Meanwhile a text takes twenty times its size: little of it stays in the processor's
# cache, which saves a twentieth, and `turns: each` makes much of one line. Processes must have a share each.
_AT_ONCE_FAST, _AT_ONCE_SLOW = 64 * 1024, 8 * 1024 * 1024
_canonical = msgspec.msgpack.Encoder(order="sorted")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class ChatTokenizer:
    """A tokenizer with its chat template: a fast one (Rust), or a slow one with its own code. Threads may share it."""

    def __init__(self, directory: Path, *, trust_remote_code: bool = False, processes: int = 0) -> None:
        """`processes` are those of a slow tokenizer, 0: one a core. Raises Fatal, saying what to do, for a tokenizer
        that cannot be used. Takes seconds: not on the loop."""
        self._tokenizer = tokenizer_files.load(directory, trust_remote_code=trust_remote_code)
        self.is_fast: bool = self._tokenizer.is_fast
        self.at_once = _AT_ONCE_FAST if self.is_fast else _AT_ONCE_SLOW
        self._has_own_code = not type(self._tokenizer).__module__.startswith("transformers.")
        if not self.is_fast and not trust_remote_code:
            raise Fatal(
                f"TOKENHAUL_INGEST_TOKENIZER {directory}: {type(self._tokenizer).__name__} is a slow tokenizer; "
                "a directory with a tokenizer.json is needed"
            )
        if not self._tokenizer.chat_template:
            raise Fatal(f"TOKENHAUL_INGEST_TOKENIZER {directory}: no chat template: put chat_template.jinja there")
        self._slow = None if self.is_fast else SlowEncoder(directory, processes)
        if self.is_fast:
            # Batches are encoded side by side, each in the thread that asks. Threads of Rust's own would take a tenth
            # more CPU, as what one allocates another one frees, and leave cores idle at the end of each batch.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            self._rust = self._tokenizer._tokenizer
            self._rust.no_truncation()
            self._rust.no_padding()
            if hasattr(self._rust.model, "_resize_cache"):  # BPE and Unigram have one
                self._rust.model._resize_cache(_CACHED_WORDS)
        templates = self._tokenizer.chat_template
        self.templates: list[str] = list(templates.values()) if isinstance(templates, dict) else [templates]
        fix_date(self.templates)
        quicken(self.templates)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.bos_token_id: int | None = self._tokenizer.bos_token_id
        self.added_tokens: frozenset[str] = frozenset(self._tokenizer.get_added_vocab())
        self._special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        # Kimi's own code keeps all its control tokens here, reserved ones too, and tells transformers of some.
        own = getattr(self._tokenizer, "special_tokens", None)
        self._special |= set(own) if self._has_own_code and isinstance(own, dict) else set()
        self._files = tokenizer_files.fingerprint(directory, _canonical.encode(templates), with_code=self._has_own_code)

    def close(self) -> None:
        """End the processes of a slow tokenizer."""
        if self._slow:
            self._slow.close()

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
        if self._slow:
            return self._slow.encode(texts)
        if self._rust.truncation is not None or self._rust.padding is not None:
            raise Fatal("the tokenizer was told to truncate or pad: the ids would not be those of the text")
        return [encoding.ids for encoding in self._rust.encode_batch_fast(texts, add_special_tokens=False)]

    def ids(self, text: str) -> list[int]:
        """The ids of one text, made in this process."""
        return slow.encode(self._tokenizer, text) if self._slow else self.encode([text])[0]

    def plain(self, messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> list[int]:
        """The ids of a prompt as plain transformers gives them: slower, and what `encode` is held against. Of a slow
        tokenizer, what its own `encode` gives in this process."""
        if self._slow:
            return self.ids(self.render(messages, tools, kwargs))
        return list(self._apply(messages, tools, kwargs, tokenize=True, generation_prompt=True))

    def plain_text(self, text: str) -> list[int]:
        """The ids transformers gives a text when told to add no special tokens, as servers do in /v1/tokenize."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        # Code of a slow tokenizer may take another way with keywords, here as in `encode`.
        return str(self._tokenizer.decode(list(ids)) if self._slow else self._rust.decode(list(ids), False))

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
        if self.prints_date:
            names.add(DATE)
        # What its own method takes it may hand to the template under another name.
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters if self._has_own_code else {}
        return (names | (own.keys() - _TRANSFORMERS)) - set(self._tokenizer.special_tokens_map)

    @property
    def prints_date(self) -> bool:
        """Whether the template asks what day it is."""
        return any(DATE in template for template in self.templates)

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
            **with_date(kwargs),
        )
