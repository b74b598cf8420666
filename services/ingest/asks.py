"""What a source asks of every record, as its keys in the sources file say it. docs/formats.md lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from services.ingest.sampling import SET_ELSEWHERE, Sampling, Share
from services.kernel.overlap import WORDS

Format = Literal["auto", "messages", "sharegpt", "alpaca", "glaive", "input_output", "prompt", "turns", "batch", "ids"]

_TagIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
_TagText = Annotated[str, Meta(pattern=r"\S")]


_Path = Annotated[str, Meta(min_length=1)]


class Tags(msgspec.Struct, frozen=True):
    """The tags of a reasoning part, as text or as token ids."""

    open: _TagText | _TagIds
    close: _TagText | _TagIds


class Asks(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a source that say what is asked, whatever the records are read from."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$")]
    max_new_tokens: Annotated[int, Meta(ge=1)]
    format: Format = "auto"
    turns: Literal["last", "each"] = "last"
    samples: Annotated[int, Meta(ge=1)] = 1
    sampling: Literal["model"] | Sampling | Annotated[list[Share], Meta(min_length=1)] = "model"
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_room: Annotated[int, Meta(ge=1)] = 1
    chat_template_kwargs: dict[str, Any] = {}
    reasoning: Literal["auto", "none"] | Tags = "auto"
    tools: Literal["require", "ignore"] = "require"
    control_tokens: Literal["reject", "allow"] = "reject"
    exclude: list[_Path] = []
    exclude_words: Annotated[int, Meta(ge=5)] = WORDS
    metadata: Literal["all"] | list[str] = []
    revision: Annotated[int, Meta(ge=0)] = 0

    @property
    def samplings(self) -> list[tuple[float, Sampling]]:
        """What the source itself says about sampling, each way with its weight."""
        if isinstance(self.sampling, list):
            return [(share.weight, share) for share in self.sampling]
        return [(1.0, Sampling() if isinstance(self.sampling, str) else self.sampling)]


A = TypeVar("A", bound=Asks)


def convert(item: Any, cls: type[A]) -> A:
    """A source of class `cls` from its mapping. Raises ValueError naming the key and what is allowed."""
    if not isinstance(item, dict):
        raise ValueError(f"must be a mapping of keys, not {item!r}")
    # Dates become the text they were written as: a template would be given an object it cannot print.
    item = _without_nulls(msgspec.to_builtins(item, str_keys=True), cls, "key")
    if isinstance(item.get("sampling"), dict):
        item["sampling"] = _sampling(item["sampling"], Sampling)
    elif isinstance(item.get("sampling"), list):
        shares = item["sampling"]
        item["sampling"] = [_sampling(share, Share) if isinstance(share, dict) else share for share in shares]
    if isinstance(item.get("exclude"), str):
        item["exclude"] = [item["exclude"]]
    if isinstance(item.get("reasoning"), dict):
        item["reasoning"] = _without_nulls(item["reasoning"], Tags, "key of reasoning")
    source = msgspec.convert(item, cls)
    for _, sampling in source.samplings:
        if (sampling.min_new_tokens or 0) > source.max_new_tokens:
            raise ValueError("sampling.min_new_tokens is above max_new_tokens")
    return source


def _sampling(given: dict[str, Any], known: type[Sampling]) -> dict[str, Any]:
    for name, reason in SET_ELSEWHERE.items():
        if name in given:
            raise ValueError(f"sampling.{name} cannot be set: {reason}")
    return _without_nulls(given, known, "sampling parameter")


def _without_nulls(given: Mapping[Any, Any], known: type[msgspec.Struct], what: str) -> dict[str, Any]:
    """What was given, null meaning absent. Raises ValueError for a name that `known` has not."""
    for name in given:
        if name not in known.__struct_fields__:
            raise ValueError(f"unknown {what} {name!r}; allowed are {', '.join(known.__struct_fields__)}")
    return {name: value for name, value in given.items() if value is not None}
