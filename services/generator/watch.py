"""Keeps the picture of every engine true: does it answer, who is it, how busy is it, which addresses are there.

An engine that does not answer gets no work until it does, and is asked who it is when it comes back: it may have been
started again with another model.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from schemas.control import Probes
from services.generator import identity, sglang, status, tokenizer
from services.generator.engine import Engine
from services.generator.engines import Engines
from services.generator.http import Http, HttpError
from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.generator.window import Load, Window
from services.kernel.retry import Backoff, set_within

log = logging.getLogger("tokenhaul.engines")

_PROBE_SECONDS = 0.5
_TRIAL_SECONDS = 0.25
_RESOLVE_SECONDS = 10.0
_LOUD_SECONDS = 30.0
_DNS = "dns+"
_FIRST_WINDOW = 16
_ROUTER_WINDOW = 64


class Watch:
    """Fills the pool and keeps it right. `label` is the dataset's model, `probes` what tokenizers must make."""

    def __init__(
        self,
        settings: GeneratorSettings,
        label: str,
        probes: Callable[[], Probes | None],
        pool: Engines,
        http: Http,
        metrics: GeneratorMetrics,
    ) -> None:
        self._settings, self._label, self._probes, self._pool = settings, label, probes, pool
        self._http, self._metrics = http, metrics

    async def run(self) -> None:
        """For ever. Addresses of the form dns+http://name:port are looked up again and again: one engine for each."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    urls = [url for given in self._settings.engines for url in await _resolve(given)]
                    self._take_over(urls, group)
                except LookupError as error:  # the engines known so far stay
                    log.warning("engine addresses cannot be looked up: %s", error, extra={"action": "engine"})
                if not any(given.startswith(_DNS) for given in self._settings.engines):
                    return
                await asyncio.sleep(_RESOLVE_SECONDS)

    def _take_over(self, urls: list[str], group: asyncio.TaskGroup) -> None:
        known = {engine.url: engine for engine in self._pool.all}
        for url in dict.fromkeys(urls):
            if url not in known:
                engine = Engine(url, self._new_window())
                self._pool.all.append(engine)
                group.create_task(self._follow(engine))
        for url, engine in known.items():
            engine.retired = url not in urls

    def _new_window(self) -> Window:
        fixed = self._settings.window
        return Window(fixed, fixed) if fixed else Window(_FIRST_WINDOW, self._settings.window_most)

    async def _follow(self, engine: Engine) -> None:
        """One engine, until its address is gone, its last request has ended and its death, if it died, is known."""
        backoff, loud_at = Backoff(base=0.5, cap=10.0), 0.0
        while not engine.retired or engine.in_flight or engine.on_trial:
            engine.probe_now.clear()
            trouble = await self._probe(engine)
            if trouble and (engine.ready or time.monotonic() >= loud_at):
                loud_at = time.monotonic() + _LOUD_SECONDS
                log.warning("engine %s takes no work: %s", engine.name, trouble, extra={"action": "engine"})
            if trouble:
                engine.identity = None
                wait = backoff.next()
            else:
                backoff.reset()
                loud_at = 0.0
                wait = _PROBE_SECONDS * random.uniform(0.8, 1.2)
            engine.probed(well=not trouble)
            self._metrics.engine(engine)
            self._pool.hand_out()
            await set_within(engine.probe_now, _TRIAL_SECONDS if engine.on_trial else wait)
        self._pool.all.remove(engine)
        self._metrics.forget(engine)

    async def _probe(self, engine: Engine) -> str:
        """Why the engine takes no work; empty when it does. Its window is brought up to date on the way."""
        try:
            if not await status.is_ready(self._http, engine.url):
                return "not ready"
            # New probes: ingest was started after us, or with another tokenizer.
            known = engine.identity is not None and engine.probes == self._probes()
            if not known and (refused := await self._meet(engine)):
                return f"refused: {refused}"
            load = await status.load(self._http, engine.url)
        except (HttpError, TimeoutError, ValueError) as error:
            return f"no answer: {error!r}"
        if load is None:
            if not self._settings.window:
                engine.window.unseen(time.monotonic(), engine.in_flight)
            return ""
        retracted, engine.retracted = load.retracted + engine.retracted, 0
        load = Load(load.running, load.waiting, load.usage, retracted)
        if not self._settings.window:
            engine.window.update(time.monotonic(), load, engine.in_flight)
        self._metrics.load(engine, load)
        return ""

    async def _meet(self, engine: Engine) -> str | None:
        """Ask an engine that is new, or back, who it is. Why it is refused, or None."""
        found, probes = await identity.read(self._http, engine.url), self._probes()
        refused = identity.refusal(
            found, self._label, self._settings.model_path, router_retries_off=self._settings.router_retries_off
        )
        if not refused and probes and not found.router:  # through a router one of many would answer
            refused = await tokenizer.disagreement(self._http, engine.url, probes)
        if not refused and engine.identity is None:  # else it is at work, and only the probes are new
            refused = await sglang.without_ids(self._http, engine.url)
        if refused:
            return refused
        engine.identity, engine.probes = found, probes
        if found.router and not self._settings.window:
            engine.window = Window(_ROUTER_WINDOW, self._settings.window_most)
        log.info(
            "engine %s is ready: %s, SGLang %s", engine.name, found.model_path, found.version or "behind a router",
            extra={"action": "engine"},
        )  # fmt: skip
        if not found.deterministic and not found.router:
            log.warning(
                "engine %s ignores sampling_seed: it runs without --enable-deterministic-inference", engine.name,
                extra={"action": "engine"},
            )  # fmt: skip
        return None


async def _resolve(given: str) -> list[str]:
    """The engine's URLs behind a setting: itself, or one for each address of a name in DNS."""
    if not given.startswith(_DNS):
        return [given.rstrip("/")]
    parts = urlsplit(given.removeprefix(_DNS))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_STREAM, family=socket.AF_INET
        )
    except OSError as error:
        raise LookupError(f"{parts.hostname}: {error}") from error
    hosts = sorted({str(address[4][0]) for address in found})
    return [f"{parts.scheme}://{host}:{parts.port or 80}" for host in hosts]
