"""The engines: which of them take work, and who gets the next free place.

An engine that does not answer its probe, or that lost a connection, gets nothing until a probe succeeds again. Prompts
wait in the order they came; the engine with the fewest requests in flight is taken first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import httpx

from services.generator import sglang
from services.generator.metrics import GeneratorMetrics
from services.kernel.retry import Backoff

log = logging.getLogger("tokenhaul.engines")

_PROBE_SECONDS = 5.0


class Engine:
    """One base URL."""

    def __init__(self, url: str, window: int) -> None:
        self.url = url
        self.window = window
        self.in_flight = 0
        self.ready = False
        self.version: str | None = None
        self.probe_now = asyncio.Event()


class Engines:
    """All engines of this generator. `watch` must run for any of them to become ready."""

    def __init__(self, urls: list[str], window: int, http: httpx.AsyncClient, metrics: GeneratorMetrics) -> None:
        self._engines = [Engine(url.rstrip("/"), window) for url in urls]
        self._http = http
        self._metrics = metrics
        self._waiting: deque[asyncio.Future[Engine]] = deque()
        for engine in self._engines:
            metrics.window.labels(engine.url).set(window)

    @property
    def capacity(self) -> int:
        """Requests in flight when every engine is full."""
        return sum(engine.window for engine in self._engines)

    async def acquire(self) -> Engine:
        """A place on the least busy engine, as soon as there is one. Give it back with `release`."""
        place: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(place.result())
            raise

    def release(self, engine: Engine) -> None:
        """The request on `engine` ended."""
        engine.in_flight -= 1
        self._metrics.running.labels(engine.url).set(engine.in_flight)
        self._hand_out()

    def suspect(self, engine: Engine) -> None:
        """A connection failed: no more work for `engine` before a probe succeeds."""
        self._set_ready(engine, False)
        engine.probe_now.set()

    async def watch(self) -> None:
        """Probe all engines for ever."""
        async with asyncio.TaskGroup() as group:
            for engine in self._engines:
                group.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        backoff = Backoff(base=0.5, cap=10.0)
        while True:
            engine.probe_now.clear()
            trouble = await self._probe(engine)
            if trouble:
                wait = backoff.next()
                level = logging.INFO if engine.ready else logging.WARNING
                log.log(level, "engine %s takes no work (%s); asking again in %.1f s", engine.url, trouble, wait)
            else:
                backoff.reset()
                wait = _PROBE_SECONDS
            self._set_ready(engine, not trouble)
            try:
                await asyncio.wait_for(engine.probe_now.wait(), wait)
                await asyncio.sleep(backoff.next())  # a connection just failed: give the server a moment
            except TimeoutError:
                continue

    async def _probe(self, engine: Engine) -> str:
        """Why the engine takes no work; empty when it does."""
        try:
            if not await sglang.is_ready(self._http, engine.url):
                return "not ready"
            if not engine.ready:
                info = await sglang.identity(self._http, engine.url)
                engine.version = info.get("version")
                log.info("engine %s is ready (SGLang %s)", engine.url, engine.version, extra={"action": "engine"})
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            return f"no answer: {error!r}"
        return ""

    def _set_ready(self, engine: Engine, ready: bool) -> None:
        engine.ready = ready
        self._metrics.engine_up.labels(engine.url).set(ready)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            if self._waiting[0].done():  # cancelled while it waited
                self._waiting.popleft()
                continue
            free = [engine for engine in self._engines if engine.ready and engine.in_flight < engine.window]
            if not free:
                return
            engine = min(free, key=lambda engine: engine.in_flight)
            engine.in_flight += 1
            self._metrics.running.labels(engine.url).set(engine.in_flight)
            self._waiting.popleft().set_result(engine)
