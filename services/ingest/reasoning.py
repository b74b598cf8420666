"""The tags of a reasoning part, as ids of the model, and whether a prompt already stands inside of one."""

from __future__ import annotations

import msgspec

from schemas.prompts import Reasoning
from services.ingest.asks import Asks, Tags
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Fatal

OPEN, CLOSE = "<think>", "</think>"


class ReasoningTags(msgspec.Struct, frozen=True):
    """A source's tags; `open_text` is how the open tag reads in a rendered prompt."""

    open: list[int]
    close: list[int]
    open_text: str

    def state(self, text: str) -> Reasoning:
        """The state of a rendered prompt: opened when it ends with the open tag, white space aside.

        Text, not ids, is looked at: ids differ where a tag that is no token of its own merges with what follows it."""
        return Reasoning(open=self.open, close=self.close, opened=text.rstrip().endswith(self.open_text))


def resolve(source: Asks, tokenizer: ChatTokenizer, vocab_size: int) -> ReasoningTags | None:
    """The tags of a source, or None for no reasoning. Raises Fatal for ids outside the vocabulary."""
    if source.reasoning == "none":
        return None
    if source.reasoning == "auto":
        known = tokenizer.added_tokens | set(tokenizer.templates)
        if not any(tag in text for tag in (OPEN, CLOSE) for text in known):
            return None
        asked = Tags(OPEN, CLOSE)
    else:
        asked = source.reasoning
    open, close = (tag if isinstance(tag, list) else tokenizer.encode([tag])[0] for tag in (asked.open, asked.close))
    if outside := [id for id in (*open, *close) if id >= vocab_size]:
        raise Fatal(f"source {source.name!r}: reasoning tags have ids {outside}, beyond vocab_size {vocab_size}")
    text = (asked.open if isinstance(asked.open, str) else tokenizer.decode(open)).strip()
    if not text:
        raise Fatal(f"source {source.name!r}: the ids {open} of the open tag are no text: a prompt cannot end with it")
    return ReasoningTags(open, close, text)
