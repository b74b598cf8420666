"""Whether an engine takes work, and how busy it is."""

from __future__ import annotations

import asyncio

import msgspec

from services.generator.http import Http
from services.generator.window import Load

_SECONDS = 30.0


class _Queues(msgspec.Struct):
    retracted: int = 0


class _Rank(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float = 0.0
    queues: _Queues = msgspec.field(default_factory=_Queues)


class _Loads(msgspec.Struct):
    loads: list[_Rank]


_decode = msgspec.json.Decoder(_Loads).decode


async def is_ready(http: Http, url: str) -> bool:
    """A server's /ready answers at once; a router has /readiness; else /health, which may generate a token."""
    for path in ("/ready", "/readiness", "/health"):
        async with asyncio.timeout(_SECONDS):
            response = await http.get(url + path)
        if response.status != 404:
            return response.status == 200
    return False


async def load(http: Http, url: str) -> Load | None:
    """What /v1/loads says, over all data-parallel ranks; None where there is no such route (a router). Raises
    ValueError for another answer."""
    async with asyncio.timeout(_SECONDS):
        response = await http.get(f"{url}/v1/loads")
    if response.status == 404:
        return None
    try:
        ranks = _decode(response.content).loads
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"/v1/loads answered {response.status}: {error}") from error
    return Load(
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        usage=max((rank.token_usage for rank in ranks), default=0.0),
        retracted=sum(rank.queues.retracted for rank in ranks),
    )
