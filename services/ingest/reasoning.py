"""The tags of a reasoning part, as ids of the model, and whether a prompt already stands inside of one."""

from __future__ import annotations

import msgspec

from schemas.prompts import Reasoning
from services.ingest.asks import Asks, Tags
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Fatal

FAMILIES = (
    # Kimi-K2.5, DeepSeek-R1 and V3.1 (opened by the prompt); Qwen3, GLM, Kimi-K2-Thinking (opened by the model)
    (("<think>", "</think>"), Tags("<think>", "</think>")),
    # Magistral
    (("[THINK]", "[/THINK]"), Tags("[THINK]", "[/THINK]")),
    # gpt-oss: the channel of analysis, up to the end of its message
    (("<|channel|>",), Tags("<|channel|>analysis<|message|>", "<|end|>")),
)
"""(what a template or vocabulary of the family knows, its tags)."""

# What a tag is tried beside.
_BEFORE = ("", "\n", "\n\n", " ", ".", ". ", ".\n", "a", "。", ")", "!", "?", "`", "*")
_AFTER = ("", "\n", "\n\n", " ", "a", ".")


class Tag(msgspec.Struct, frozen=True):
    """A tag as ids and as text. `variants`: its ids where they merge with what stands beside it."""

    ids: list[int]
    text: str
    variants: list[list[int]] = []


class ReasoningTags(msgspec.Struct, frozen=True):
    """A source's tags."""

    open: Tag
    close: Tag

    def state(self, text: str) -> Reasoning:
        """The state of a rendered prompt: opened when it ends with the open tag, white space aside.

        Text, not ids, is looked at: ids differ where a tag that is no token of its own merges with what follows it."""
        return Reasoning(
            open=self.open.ids,
            close=self.close.ids,
            opened=text.rstrip().endswith(self.open.text),
            open_variants=self.open.variants,
            close_variants=self.close.variants,
        )


def resolve(source: Asks, tokenizer: ChatTokenizer, vocab_size: int) -> ReasoningTags | None:
    """The tags of a source, or None for no reasoning. Raises Fatal for ids that can never be those of a tag."""
    asked = _family(tokenizer) if source.reasoning == "auto" else source.reasoning
    if asked is None or isinstance(asked, str):
        return None
    where = f"source {source.name!r}: reasoning"
    return ReasoningTags(
        _tag(asked.open, f"{where}.open", tokenizer, vocab_size),
        _tag(asked.close, f"{where}.close", tokenizer, vocab_size),
    )


def _family(tokenizer: ChatTokenizer) -> Tags | None:
    known = tokenizer.added_tokens | set(tokenizer.templates)
    for marks, tags in FAMILIES:
        if any(mark in text for mark in marks for text in known):
            return tags
    return None


def _tag(given: str | list[int], where: str, tokenizer: ChatTokenizer, vocab_size: int) -> Tag:
    ids = given if isinstance(given, list) else tokenizer.ids(given)
    if outside := [id for id in ids if id >= vocab_size]:
        raise Fatal(f"{where}: ids {outside} are beyond vocab_size {vocab_size}")
    whole = given if isinstance(given, str) else tokenizer.decode(ids)
    if not whole.strip():
        raise Fatal(f"{where}: the ids {ids} are no text: a prompt cannot end with them")
    if (written := tokenizer.ids(whole)) != ids:
        raise Fatal(
            f"{where}: the ids {ids} read {whole!r}, which the tokenizer writes as {written}: they would never be "
            "found. Give the tag as text, or its ids as this tokenizer has them"
        )
    return Tag(ids, whole.strip(), _variants(ids, whole, tokenizer))


def _variants(ids: list[int], text: str, tokenizer: ChatTokenizer) -> list[list[int]]:
    """What a tag of several ids (DeepSeek-V3's </think>) becomes beside other text: its last `>` merges with a line
    break, its first `<` with a full stop. An added token never merges."""
    if len(ids) == 1 and text in tokenizer.added_tokens:
        return []
    found = []
    for before in _BEFORE:
        for after in _AFTER:
            whole = tokenizer.ids(before + text + after)
            if tokenizer.decode(whole) != before + text + after:
                continue  # a tokenizer that is not reversible there
            reached = [len(tokenizer.decode(whole[:count])) for count in range(len(whole) + 1)]
            first = max(n for n, length in enumerate(reached) if length <= len(before))
            last = next(n for n, length in enumerate(reached) if length >= len(before) + len(text))
            variant = whole[first:last]
            if variant != ids and variant not in found and tokenizer.decode(variant).strip():
                found.append(variant)
    return found
