"""When a sequence is over, and what of its text is shown then.

Both differ on purpose: whatever ends a sequence stays in its ids (the stop token, every id up to the one that
completes a stop string) and is cut from the text. Seen on SGLang 0.5.23: recordings 01 to 07, 13p3, 19c.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from services.local.engine.request import Generation

FinishReason = dict[str, Any]  # the object SGLang puts into meta_info.finish_reason
Decode = Callable[[list[int], bool], str]  # (ids, skip special tokens) -> text


def stopped(matched: int | str) -> FinishReason:
    """The finish reason of a sequence that met one of its stops: an id, a string or a pattern."""
    return {"type": "stop", "matched": matched}


class StopCheck:
    """The stop conditions of one generation."""

    def __init__(self, generation: Generation, eos_ids: frozenset[int], decode: Decode) -> None:
        sampling = generation.sampling
        self._limit = generation.limit
        # ignore_eos switches stop_token_ids off as well, stop strings go on working (recording 07c).
        self._stop_ids = frozenset() if sampling.ignore_eos else eos_ids | sampling.stop_ids
        self._strings = sampling.stop_strings
        self._patterns = [re.compile(pattern) for pattern in sampling.stop_patterns]
        self._decode = decode

    def cut(self, before: list[int], ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """What of `ids`, which follow `before`, belongs to the sequence, and why it ends there if it does."""
        ids = ids[: self._limit - len(before)]
        stop = None
        if not self._stop_ids.isdisjoint(ids):
            stop = next(index for index, token in enumerate(ids) if token in self._stop_ids)
            ids = ids[: stop + 1]
        if self._strings or self._patterns:
            for count in range(1, len(ids) + (stop is None)):
                if (matched := self._match(before + ids[:count])) is not None:
                    return ids[:count], stopped(matched)
        if stop is not None:
            return ids, stopped(ids[stop])
        length = len(before) + len(ids)
        return ids, {"type": "length", "length": length} if length >= self._limit else None

    def _match(self, output_ids: list[int]) -> str | None:
        text = self._decode(output_ids, False)
        for string in self._strings:
            if string in text:
                return string
        return next((pattern.pattern for pattern in self._patterns if pattern.search(text)), None)


def visible_text(
    generation: Generation,
    output_ids: list[int],
    reason: FinishReason | None,
    decode: Decode,
) -> str:
    """The text of an answer: without the stop, unless no_stop_trim; a matched pattern is never cut (05e)."""
    sampling = generation.sampling
    matched = reason.get("matched") if reason is not None and not sampling.no_stop_trim else None
    if isinstance(matched, int):
        output_ids = output_ids[:-1]
    text = decode(output_ids, sampling.skip_special_tokens)
    if isinstance(matched, str) and matched in sampling.stop_strings:
        text = text.partition(matched)[0] if matched else ""
    return text
