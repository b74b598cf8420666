"""The tags of a reasoning part, as ids of the model, and whether a prompt already stands inside of one."""

from __future__ import annotations

import logging

import msgspec

from schemas.prompts import Reasoning
from services.ingest.asks import Asks, Tags
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Fatal

log = logging.getLogger("tokenhaul.ingest")

FAMILIES = (
    # Kimi-K2.5, DeepSeek-R1 and V3.1 (opened by the prompt); Qwen3, GLM, Kimi-K2-Thinking (opened by the model)
    (("<think>", "</think>"), Tags("<think>", "</think>")),
    # Magistral
    (("[THINK]", "[/THINK]"), Tags("[THINK]", "[/THINK]")),
    # gpt-oss: the channel of analysis, up to the end of its message
    (("<|channel|>",), Tags("<|channel|>analysis<|message|>", "<|end|>")),
)
"""(what a template or vocabulary of the family knows, its tags)."""


class ReasoningTags(msgspec.Struct, frozen=True):
    """A source's tags as ids, and how they read in text."""

    open: list[int]
    close: list[int]
    open_text: str
    close_text: str

    def state(self, text: str) -> Reasoning:
        """The state of a rendered prompt: opened when it ends with the open tag, white space aside.

        Text, not ids, is looked at: ids differ where a tag that is no token of its own merges with what follows it."""
        return Reasoning(open=self.open, close=self.close, opened=text.rstrip().endswith(self.open_text))


def resolve(source: Asks, tokenizer: ChatTokenizer, vocab_size: int) -> ReasoningTags | None:
    """The tags of a source, or None for no reasoning. Raises Fatal for ids that can never be those of a tag."""
    asked = _family(tokenizer) if source.reasoning == "auto" else source.reasoning
    if asked is None or isinstance(asked, str):
        return None
    open, open_text = _tag(asked.open, "open", source, tokenizer, vocab_size)
    close, close_text = _tag(asked.close, "close", source, tokenizer, vocab_size)
    return ReasoningTags(open, close, open_text, close_text)


def _family(tokenizer: ChatTokenizer) -> Tags | None:
    known = tokenizer.added_tokens | set(tokenizer.templates)
    for marks, tags in FAMILIES:
        if any(mark in text for mark in marks for text in known):
            return tags
    return None


def _tag(
    tag: str | list[int], name: str, source: Asks, tokenizer: ChatTokenizer, vocab_size: int
) -> tuple[list[int], str]:
    """(ids, text) of a tag given as either."""
    where = f"source {source.name!r}: reasoning.{name}"
    ids = tag if isinstance(tag, list) else tokenizer.encode([tag])[0]
    if outside := [id for id in ids if id >= vocab_size]:
        raise Fatal(f"{where}: ids {outside} are beyond vocab_size {vocab_size}")
    text = (tag if isinstance(tag, str) else tokenizer.decode(ids)).strip()
    if not text:
        raise Fatal(f"{where}: the ids {ids} are no text: a prompt cannot end with them")
    if isinstance(tag, list) and (written := tokenizer.encode([tokenizer.decode(ids)])[0]) != ids:
        raise Fatal(
            f"{where}: the ids {ids} read {text!r}, which the tokenizer writes as {written}: it would never be found. "
            f"Give the tag as text, or its ids as this tokenizer has them"
        )
    if len(ids) > 1 and tokenizer.encode([f"{text}\n\n"])[0][: len(ids)] != ids:
        log.warning(
            "%s: %r is %d ids here, %s, and its last one merges with a line break behind it: where a model writes "
            "one there, the tag will not be found", where, text, len(ids), ids, extra={"action": "preflight"},
        )  # fmt: skip
    return ids, text
