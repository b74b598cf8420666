"""/livez, /readyz and /metrics of a service.

Ready: the service's Kafka side works. Live: the event loop runs, and while the service is ready its own loop turned
lately; while it waits for Kafka there is nothing a restart would mend. Engines and lag are in neither: a pod must not
be restarted, nor a rollout held, because an engine loads for ten minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

LOOP_LIMIT_SECONDS = 120.0


class Health:
    """What the probes answer. The service's loop calls `beat` on every turn and `set_ready` when Kafka changes."""

    def __init__(self) -> None:
        self._beat = time.monotonic()
        self._not_ready = "starting"
        self._kafka_away = ""

    def beat(self) -> None:
        """The loop turned."""
        self._beat = time.monotonic()

    def set_ready(self, *, because: str = "") -> None:
        """Ready, or not ready `because` of something."""
        if self._not_ready and not because:
            self.beat()
        self._not_ready = because

    @contextmanager
    def unready_after(self, seconds: float, because: str) -> Iterator[None]:
        """Not ready while what is done inside takes longer than `seconds`."""
        late = asyncio.get_running_loop().call_later(seconds, lambda: self.set_ready(because=because))
        try:
            yield
        finally:
            late.cancel()
        self.set_ready()

    def set_kafka(self, *, away_because: str = "") -> None:
        """Kafka answers, or does not."""
        if self._kafka_away and not away_because:
            self.beat()
        self._kafka_away = away_because

    @property
    def not_ready(self) -> str:
        """Why the service is not ready; empty when it is."""
        return self._kafka_away or self._not_ready

    @property
    def loop_age(self) -> float:
        """Seconds since the loop of a ready service turned."""
        return 0.0 if self.not_ready else time.monotonic() - self._beat


async def serve(health: Health, registry: CollectorRegistry, host: str, port: int) -> web.AppRunner:
    """Start answering on host:port. The caller cleans the runner up."""

    async def livez(_: web.Request) -> web.Response:
        age = health.loop_age
        if age > LOOP_LIMIT_SECONDS:
            return web.Response(status=503, text=f"the loop has not turned for {age:.0f} s\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if health.not_ready:
            return web.Response(status=503, text=f"{health.not_ready}\n")
        return web.Response(text="ok\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
