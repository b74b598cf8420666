"""What a source asks of every record, resolved against the model and its tokenizer."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from services.ingest import reasoning, sampling
from services.ingest.asks import Asks
from services.ingest.model import Model
from services.ingest.reasoning import ReasoningTags
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Fatal

_canonical = msgspec.msgpack.Encoder(order="sorted")
_GIVEN_BY_US = {"messages", "tools", "documents", "add_generation_prompt"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling` lacks max_new_tokens, which depends on the length of the prompt. `settings` is the hash of all that
    makes a record of this source the record it is: a cursor carries it, so that a changed request is noticed."""

    source: Asks
    model: str
    vocab_size: int
    context_length: int
    sampling: dict[str, Any]
    reasoning: ReasoningTags | None
    tokenizer_fingerprint: str
    settings: bytes = b""


def resolve(source: Asks, label: str, model: Model, tokenizer: ChatTokenizer) -> Request:
    """Raises Fatal, naming the source and what to do, for what the model or the template cannot do."""
    _check_kwargs(source, tokenizer)
    end_ids = model.end_ids if tokenizer.eos_token_id is None else model.end_ids | {tokenizer.eos_token_id}
    request = Request(
        source=source,
        model=label,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        sampling=sampling.resolve(source.asked_sampling, model.generation, end_ids, model.vocab_size, source.name),
        reasoning=reasoning.resolve(source, tokenizer, model.vocab_size),
        tokenizer_fingerprint=tokenizer.fingerprint(source.chat_template_kwargs),
    )
    asked = (
        msgspec.to_builtins(request)
        | {key: getattr(source, key) for key in ("max_new_tokens", "samples", "format", "turns", "tools")}
        | {"source": None, "settings": None}
    )
    return msgspec.structs.replace(request, settings=blake2b(_canonical.encode(asked), digest_size=16).digest())


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
