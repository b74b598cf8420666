"""One SGLang server, or a router in front of some, as this generator sees it."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from schemas.control import Probes
from services.generator.identity import Identity
from services.generator.window import Window

# After a lost connection the process of a dying server may go on listening for this long (seen: up to 6 s).
DYING_SECONDS = 8.0
_RATE_WEIGHT = 0.1


class Engine:
    """Its place in the pool. `reserved`: one suspect has it for itself; `retired`: its address is no longer given."""

    def __init__(self, url: str, window: Window) -> None:
        self.url = url
        self.name = urlsplit(url).netloc
        """Short, for logs and as a metric label."""
        self.window = window
        self.in_flight = 0
        self.ready = False
        self.reserved = False
        self.retired = False
        self.identity: Identity | None = None
        self.probes: Probes | None = None
        """What its tokenizer was held against when it was met."""
        self.retracted = 0
        """Retractions of our requests since the window was last looked at."""
        self.probe_now = asyncio.Event()
        self._token_rate: float | None = None
        self._verdict: asyncio.Future[bool] | None = None
        self._verdict_at = 0.0

    @property
    def free(self) -> bool:
        """It takes one more request."""
        return self.ready and not (self.reserved or self.retired) and self.in_flight < self.window.limit

    @property
    def router(self) -> bool:
        """It hides the servers that do the work."""
        return self.identity is not None and self.identity.router

    @property
    def on_trial(self) -> bool:
        """A connection was lost, and it is not known yet whether the engine died."""
        return self._verdict is not None

    async def died(self) -> bool:
        """After a connection was lost with a request in flight: did the engine die? Known within seconds. Everybody who
        lost one at that time gets the same answer."""
        if self._verdict is None:
            self._verdict = asyncio.get_running_loop().create_future()
            self._verdict_at = time.monotonic() + DYING_SECONDS
            self.probe_now.set()
        return await asyncio.shield(self._verdict)

    def probed(self, *, well: bool) -> None:
        """What a probe found. One that fails is the verdict; one that succeeds only after a while."""
        self.ready = well
        if self._verdict is not None and (not well or time.monotonic() >= self._verdict_at):
            self._verdict.set_result(not well)
            self._verdict = None

    def finished(self, tokens: int, seconds: float) -> None:
        """A request gave `tokens` in `seconds`."""
        if seconds > 0:
            rate = tokens / seconds
            self._token_rate = (
                rate if self._token_rate is None else self._token_rate + _RATE_WEIGHT * (rate - self._token_rate)
            )

    def deadline(self, max_new_tokens: int, request_seconds: float, token_seconds: float) -> float:
        """How long a request may take, in seconds: `token_seconds` a token until we know better, then a quarter of the
        usual speed."""
        if self._token_rate:
            token_seconds = min(token_seconds, 4.0 / self._token_rate)
        return request_seconds + max_new_tokens * token_seconds
