"""The probes of a tokenizer and what /v1/tokenize of an engine says of them: what is asked, and how it differs."""

from __future__ import annotations

import msgspec

from schemas.control import Probe, Probes

PATH = "/v1/tokenize"
_TEXT_SHOWN = 80
_IDS_SHOWN = 8


class _Tokens(msgspec.Struct):
    tokens: list[list[int]]


_decode = msgspec.json.Decoder(_Tokens).decode


def question(probes: Probes) -> bytes:
    """The body to post."""
    texts = [probe.text for probe in probes.probes]
    return msgspec.json.encode({"model": "default", "prompt": texts, "add_special_tokens": False})


def disagreement(status: int, content: bytes, probes: Probes) -> str | None:
    """How the answer differs from the probes; None if it does not. Raises ValueError for an answer that is none."""
    if status != 200:
        raise ValueError(f"{PATH} answered {status}")
    try:
        answers = _decode(content).tokens
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{PATH}: {error}") from error
    if len(answers) != len(probes.probes):
        raise ValueError(f"{PATH} answered {len(answers)} lists for {len(probes.probes)} texts")
    return next(filter(None, map(_difference, probes.probes, _without_bos(probes, answers))), None)


def _without_bos(probes: Probes, answers: list[list[int]]) -> list[list[int]]:
    """The answers without the id that stands before each: newer servers ignore add_special_tokens."""
    firsts = {tuple(got[:1]) for probe, got in zip(probes.probes, answers, strict=True) if got[1:] == probe.ids}
    everywhere = len(firsts) == 1 and all(tuple(got[:1]) in firsts for got in answers)
    return [got[1:] for got in answers] if everywhere else answers


def _difference(probe: Probe, got: list[int]) -> str | None:
    if got == probe.ids:
        return None
    at = next(
        (n for n, (a, b) in enumerate(zip(probe.ids, got, strict=False)) if a != b), min(len(got), len(probe.ids))
    )
    shown = slice(max(0, at - 2), at + _IDS_SHOWN)
    text = probe.text if len(probe.text) <= _TEXT_SHOWN else f"{probe.text[:_TEXT_SHOWN]}..."
    return (
        f"its tokenizer is not the one of the prompts: of {text!r} ingest made {len(probe.ids)} ids, at {shown.start} "
        f"{probe.ids[shown]}, /v1/tokenize makes {len(got)}, there {got[shown]}"
    )
