"""What a source asks of every record, resolved against the model and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from schemas import ids
from services.ingest import reasoning, sampling
from services.ingest.asks import Asks
from services.ingest.model import Model
from services.ingest.reasoning import ReasoningTags
from services.ingest.record import Own
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Fatal, Reject
from services.kernel.rendering import DATE, with_date

_canonical = msgspec.msgpack.Encoder(order="sorted")
_GIVEN_BY_US = {"messages", "tools", "documents", "add_generation_prompt"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`samplings` are the ways to sample, with their weights; they lack max_new_tokens, which depends on the length of
    the prompt. `settings` is the hash of all that makes a record of this source the record it is: a cursor carries it,
    so that a changed request is noticed."""

    source: Asks
    model: str
    vocab_size: int
    context_length: int
    samplings: list[tuple[float, dict[str, Any]]]
    reasoning: ReasoningTags | None
    tokenizer_fingerprint: str
    chat_template_kwargs: dict[str, Any] = {}
    settings: bytes = b""

    def check_ids(self, prompt_ids: Sequence[int]) -> None:
        """Raises Fatal for ids the model does not have."""
        if max(prompt_ids, default=0) >= self.vocab_size:
            raise Fatal(
                f"source {self.source.name!r}: the tokenizer gives id {max(prompt_ids)}, vocab_size is "
                f"{self.vocab_size}: an engine would die of it. Is the tokenizer the model's? Does "
                "TOKENHAUL_INGEST_VOCAB_SIZE say what the model was built with?"
            )

    def sampling(self, prompt_ids: Sequence[int], own: Own) -> tuple[dict[str, Any], bool]:
        """All of the sampling of one prompt, and whether max_new_tokens had to be clamped to the room there is.

        Raises Reject when there is too little, and for what the record asks that the model cannot do."""
        weights = [weight for weight, _ in self.samplings]
        which = sampling.chosen(weights, ids.prompt_id(prompt_ids)) if len(weights) > 1 else 0
        resolved = self.samplings[which][1]
        if own.sampling:
            resolved = sampling.merge(resolved, own.sampling, self.vocab_size)
        asked = own.max_new_tokens or self.source.max_new_tokens
        least = resolved.get("min_new_tokens", 0)
        if least > asked:
            raise Reject("bad_sampling", f"min_new_tokens {least} is above max_new_tokens {asked}")
        room = self.context_length - len(prompt_ids)
        if room < max(self.source.min_room, least):
            raise Reject("prompt_too_long", f"{len(prompt_ids)} ids of a context of {self.context_length}")
        if self.source.max_prompt_tokens is not None and len(prompt_ids) > self.source.max_prompt_tokens:
            allowed = self.source.max_prompt_tokens
            raise Reject("prompt_too_long", f"{len(prompt_ids)} ids, the source's max_prompt_tokens is {allowed}")
        return {**resolved, "max_new_tokens": min(asked, room)}, asked > room


def resolve(source: Asks, label: str, model: Model, tokenizer: ChatTokenizer, date: str) -> Request:
    """`date` is what a template is told that asks for the day, unless the source itself says one.

    Raises Fatal, naming the source and what to do, for what the model or the template cannot do."""
    _check_kwargs(source, tokenizer)
    kwargs = ({DATE: date} if tokenizer.prints_date else {}) | source.chat_template_kwargs
    end_ids = model.end_ids if tokenizer.eos_token_id is None else model.end_ids | {tokenizer.eos_token_id}
    request = Request(
        source=source,
        model=label,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        samplings=[
            (weight, sampling.resolve(asked, model.generation, end_ids, model.vocab_size, source.name))
            for weight, asked in source.samplings
        ],
        reasoning=reasoning.resolve(source, tokenizer, model.vocab_size),
        chat_template_kwargs=kwargs,
        tokenizer_fingerprint=tokenizer.fingerprint(kwargs),
    )
    return msgspec.structs.replace(request, settings=_hash(request))


def _hash(request: Request) -> bytes:
    """Of what a record is made of. What only decides which records are asked (limits, guards) is no part of it."""
    ways, tags = request.samplings, request.reasoning
    asked = {
        "source": None,
        "model": request.model,
        "vocab_size": request.vocab_size,
        "context_length": request.context_length,
        "sampling": ways[0][1] if len(ways) == 1 else ways,
        "reasoning": tags and {"open": tags.open.ids, "close": tags.close.ids, "open_text": tags.open.text},
        "tokenizer_fingerprint": request.tokenizer_fingerprint,
        "settings": None,
        **{key: getattr(request.source, key) for key in ("max_new_tokens", "samples", "format", "turns", "tools")},
    }
    return blake2b(_canonical.encode(asked), digest_size=16).digest()


def _check_kwargs(source: Asks, tokenizer: ChatTokenizer) -> None:
    """A switch the template never reads does nothing, silently: the prompt would not be what was asked for."""
    read = tokenizer.template_variables()
    for key in source.chat_template_kwargs:
        if key in _GIVEN_BY_US or key not in read:
            switches = ", ".join(sorted(read - _GIVEN_BY_US)) or "none"
            raise Fatal(
                f"source {source.name!r}: the chat template never reads chat_template_kwargs.{key}, or it is given by "
                f"tokenhaul; the switches this template reads: {switches}"
            )
    try:
        with_date(source.chat_template_kwargs)
    except ValueError:
        given = source.chat_template_kwargs[DATE]
        raise Fatal(
            f"source {source.name!r}: chat_template_kwargs.{DATE} {given!r} is no date like 2026-07-26"
        ) from None
