"""SGLang's sampling parameters: names, defaults and limits of 0.5.23 (facts: recordings 13f to 13v, 15l)."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from services.local.engine.errors import Refusal

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
NOT_OFFERED = ("beam_width", "watermark", "choice")
TOP_K_ALL = 1 << 30


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The fields in the order in which SGLang lists them. Numbers stay as sent: messages quote them."""

    max_new_tokens: int | None = 128
    stop: str | list[str] = []
    stop_token_ids: list[int | None] = []
    stop_regex: str | list[str] = []
    temperature: int | float = 1.0
    top_p: int | float = 1.0
    top_k: int = TOP_K_ALL
    min_p: int | float = 0.0
    frequency_penalty: int | float = 0.0
    presence_penalty: int | float = 0.0
    repetition_penalty: int | float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: Any = None
    watermark: Any = None
    choice: Any = None

    @property
    def greedy(self) -> bool:
        """SGLang takes any temperature below 1e-6 as greedy."""
        return self.temperature < 1e-6

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def stop_patterns(self) -> list[str]:
        """`stop_regex` as a list."""
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` without the nulls, which SGLang drops."""
        return frozenset(token for token in self.stop_token_ids if token is not None)


def read_sampling(given: Any) -> Sampling:
    """The parameters of one request; raises Refusal for a name or type that SGLang does not know."""
    if given is None:
        return Sampling()
    if not isinstance(given, dict):
        raise Refusal.contract(f"sampling_params: expected an object, got {type(given).__name__}")
    for name in given:
        if name not in Sampling.__struct_fields__:
            known = ", ".join(f"`{field}`" for field in Sampling.__struct_fields__)
            raise Refusal.contract(f"unknown field `{name}`, expected one of {known}")
    # For max_new_tokens null is a value of its own: as many as the context holds.
    present = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
    try:
        return msgspec.convert(present, Sampling)
    except msgspec.ValidationError as error:
        raise Refusal.contract(f"sampling_params: {error}") from None


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise Refusal for a value out of range and for features that this engine does not offer."""
    s = sampling
    longest = math.inf if s.max_new_tokens is None else s.max_new_tokens
    finite = 0 <= s.temperature < math.inf
    grammar = any(getattr(s, name) is not None for name in GRAMMARS)
    rules = [
        (finite, f"temperature must be a non-negative finite number, got {s.temperature}."),
        (0 < s.top_p <= 1, f"top_p must be in (0, 1], got {s.top_p}."),
        (0 <= s.min_p <= 1, f"min_p must be in [0, 1], got {s.min_p}."),
        (s.top_k >= 1 or s.top_k == -1, f"top_k must be -1 (disable) or at least 1, got {s.top_k}."),
        (abs(s.frequency_penalty) <= 2, f"frequency_penalty must be in [-2, 2], got {s.frequency_penalty}."),
        (abs(s.presence_penalty) <= 2, f"presence_penalty must be in [-2, 2], got {s.presence_penalty}."),
        (
            0 < s.repetition_penalty <= 2,
            f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {s.repetition_penalty}.",
        ),
        (s.min_new_tokens >= 0, f"min_new_tokens must be in [0, max_new_tokens], got {s.min_new_tokens}."),
        (longest >= 0, f"max_new_tokens must be at least 0, got {s.max_new_tokens}."),
        (
            s.min_new_tokens <= longest,
            f"min_new_tokens must be in [0, max_new_tokens({s.max_new_tokens})], got {s.min_new_tokens}.",
        ),
        (s.stream_interval >= 1, f"stream_interval must be at least 1, got {s.stream_interval}."),
        (
            not grammar,
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported "
            "when the server is launched with --grammar-backend none",
        ),
    ]
    rules += [
        (
            token.isdecimal() and int(token) < vocab_size,
            f"logit_bias must has keys in [0, {vocab_size - 1}], got {token}.",
        )
        for token in s.logit_bias
    ]
    rules += [(getattr(s, name) is None, f"{name} is not offered by this engine.") for name in NOT_OFFERED]
    for kept, message in rules:
        if not kept:
            raise Refusal.value(message)
