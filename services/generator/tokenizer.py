"""Whether an engine's tokenizer is the one ingest used.

Only ids are ever sent, so a wrong tokenizer spoils nothing by itself; but it gives away an engine that serves another
model, or another revision of it, under the right name.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from schemas.control import Probe, Probes
from services.generator.http import Http

log = logging.getLogger("tokenhaul.engines")

_SECONDS = 30.0
_TEXT_SHOWN = 80
_IDS_SHOWN = 8


class _Tokens(msgspec.Struct):
    tokens: list[list[int]]


_decode = msgspec.json.Decoder(_Tokens).decode


async def disagreement(http: Http, url: str, probes: Probes) -> str | None:
    """How the tokenizer at `url` differs from the probes; None if it does not, or if the engine has none to ask, which
    is said. Raises ValueError for an answer that is none, HttpError or TimeoutError when nobody answers."""
    body = {"model": "default", "prompt": [probe.text for probe in probes.probes], "add_special_tokens": False}
    async with asyncio.timeout(_SECONDS):
        response = await http.post(f"{url}/v1/tokenize", msgspec.json.encode(body))
    if response.status in (429, 503):
        raise ValueError(f"/v1/tokenize answered {response.status}")
    if response.status != 200:  # old servers have no such route, those with --skip-tokenizer-init no tokenizer
        log.warning(
            "the tokenizer of %s is not compared with ingest's: /v1/tokenize answered %d", url, response.status,
            extra={"action": "engine"},
        )  # fmt: skip
        return None
    try:
        answers = _decode(response.content).tokens
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"/v1/tokenize: {error}") from error
    if len(answers) != len(probes.probes):
        raise ValueError(f"/v1/tokenize answered {len(answers)} lists for {len(probes.probes)} texts")
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
