"""Messages of the topic `<prefix>.prompts`: a request, complete, so that a generator needs to know nothing else."""

from __future__ import annotations

from typing import Any

import msgspec


class SourceRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a prompt came from: file (path or URL), row (1-based line or index) and the user's own id."""

    file: str
    row: int
    id: str | None = None


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tags of a reasoning part as id sequences, and whether the prompt already ends inside of it.

    Variants are what a tag of several ids becomes where its first or last id merges with the text beside it."""

    open: list[int]
    close: list[int]
    opened: bool = False
    open_variants: list[list[int]] = []
    close_variants: list[list[int]] = []


class Prompt(msgspec.Struct, tag="prompt.v1", frozen=True, kw_only=True, omit_defaults=True):
    """One request. `sampling` is fully resolved (SGLang's names, max_new_tokens and stop_token_ids included);
    `seed` is sent as sampling_seed. `messages` and `tools` are what the user gave, as JSON text."""

    id: bytes
    prompt_ids: list[int]
    sampling: dict[str, Any]
    seed: int
    sample_index: int = 0
    revision: int = 0
    source: str
    source_ref: SourceRef
    conversation_id: str
    turn: int = 0
    messages: str | None = None
    tools: str | None = None
    model: str
    vocab_size: int
    context_length: int
    tokenizer_fingerprint: str
    chat_template_kwargs: dict[str, Any] = {}
    reasoning: Reasoning | None = None
    clamped: bool = False
    metadata: dict[str, Any] = {}
    created_at: float
