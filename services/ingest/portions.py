"""What is published is cut into transactions that Kafka takes well within their time-out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from services.ingest.intake import Part
from services.ingest.prompts import Ready

MOST_PROMPTS = 2000
MOST_BYTES = 16 * 1024 * 1024  # a single message may have that many


class Portion(msgspec.Struct, eq=False):
    """One transaction: prompts of each part; `ended`: the parts that are published with it, each with the ids of all of
    its prompts that were new."""

    prompts: list[tuple[Part, list[Ready]]] = []
    ended: list[tuple[Part, frozenset[bytes]]] = []


def portions(parts: Sequence[Part], new: Mapping[bytes, Ready]) -> Iterator[Portion]:
    """The prompts of `parts` that are `new`, each once, in their order. At least one portion."""
    left = dict(new)
    portion, count, size = Portion(), 0, 0
    for part in parts:
        own = [one for ready in part.made.prompts if (one := left.pop(ready.id, None))]
        portion.prompts.append((part, []))
        for one in own:
            if count and (count == MOST_PROMPTS or size + len(one.value) > MOST_BYTES):
                yield portion
                portion, count, size = Portion([(part, [])]), 0, 0
            portion.prompts[-1][1].append(one)
            count, size = count + 1, size + len(one.value)
        portion.ended.append((part, frozenset(one.id for one in own)))
    yield portion
