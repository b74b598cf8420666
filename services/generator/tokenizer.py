"""Whether an engine's tokenizer is the one ingest used.

Only ids are ever sent, so a wrong tokenizer spoils nothing by itself; but it gives away an engine that serves another
model, or another revision of it, under the right name.
"""

from __future__ import annotations

import asyncio
import logging

from schemas.control import Probes
from services.generator.http import Http
from services.kernel import tokenize

log = logging.getLogger("tokenhaul.engines")

_SECONDS = 30.0


async def disagreement(http: Http, url: str, probes: Probes) -> str | None:
    """How the tokenizer at `url` differs from the probes; None if it does not, or if the engine has none to ask, which
    is said. Raises ValueError for an answer that is none, HttpError or TimeoutError when nobody answers."""
    if not probes.probes:  # a slow tokenizer that servers call otherwise than the model's own code does
        return None
    async with asyncio.timeout(_SECONDS):
        response = await http.post(f"{url}/v1/tokenize", tokenize.question(probes))
    if response.status not in (200, 429, 503):  # an old server has no such route, one may have no tokenizer
        log.warning(
            "the tokenizer of %s is not compared with ingest's: /v1/tokenize answered %d", url, response.status,
            extra={"action": "engine"},
        )  # fmt: skip
        return None
    return tokenize.disagreement(response.status, response.content, probes)
