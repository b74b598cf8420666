"""From `tokenhaul <service>` to an exit status: settings, logs, probes, signals, the service itself, its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta

from services.kernel import failpoints, logs, signals
from services.kernel import health as health_server
from services.kernel.errors import Fatal, SettingsError, Stopped, TokenhaulError
from services.kernel.health import Health
from services.kernel.metrics import StageMetrics
from services.kernel.settings import Settings, load

log = logging.getLogger("tokenhaul")


class ProcessSettings(Settings, frozen=True, kw_only=True):
    """What every service process needs."""

    PREFIX: ClassVar[str] = "TOKENHAUL_"

    run_id: Annotated[
        str, Meta(description="name of this run; --until-idle waits for the idle mark ingest writes under it")
    ] = ""
    log_format: Annotated[
        Literal["auto", "json", "human"], Meta(description="form of the log; auto is human on a terminal")
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level that is logged")
    ] = "info"
    metrics_host: Annotated[str, Meta(description="address of /livez, /readyz and /metrics")] = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=1, le=65535, description="port of /livez, /readyz and /metrics")] = 9464
    drain_seconds: Annotated[
        float, Meta(ge=0, description="how long what is in flight may take to finish after SIGTERM")
    ] = 120.0
    failpoints: Annotated[
        list[str], Meta(description="for fault tests only: where this process is made to fail (kernel/failpoints.py)")
    ] = msgspec.field(default_factory=list)


class Context:
    """What the lifecycle gives a service: when to stop, where to say how it is, and how to end at once."""

    def __init__(self, process: ProcessSettings, *, until_idle: bool) -> None:
        self.process = process
        self.until_idle = until_idle
        self.stopping = asyncio.Event()
        self.health = Health()
        self._begun = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spawned: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """The service is connected: from now on a stop is its own affair. Before, it is cancelled."""
        self._begun = True

    def fail(self, error: BaseException) -> None:
        """End the service with `error`: for callbacks whose exceptions a library would swallow."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` beside the service; its failure is the service's, and it ends with the service."""
        task = asyncio.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def run(self, service: Coroutine[None, None, None]) -> None:
        """Wait for the service, for the first failure beside it, or for a stop before it has begun."""
        task = asyncio.create_task(service)
        stop = asyncio.create_task(self.stopping.wait())
        try:
            outside: set[asyncio.Future[Any]] = {task, stop, self._failure}
            await asyncio.wait(outside, return_when=asyncio.FIRST_COMPLETED)
            if self._begun:
                await asyncio.wait(outside - {stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            if task.done():
                task.result()
        finally:
            left = {task, stop, *self._spawned}
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class Service(Protocol):
    """One service: made from its settings (nothing connects yet), then run once."""

    @property
    def metrics(self) -> StageMetrics:
        """What /metrics shows."""

    def run(self, context: Context) -> Coroutine[None, None, None]:
        """The work, until it is done or `context.stopping` is set and what was in flight is dealt with."""


def _collect_less() -> None:
    """The cyclic collector walks through every list of ids there is each time it runs: a third of the CPU that a record
    cost the generator. What is there for good is left out, and it runs more seldom; memory stays as flat."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def run(make: Callable[[Mapping[str, str]], Service], environ: Mapping[str, str], *, until_idle: bool) -> int:
    """Run a service. The exit status: 0 done, 1 a bug, 2 wrong settings, 3 going on would break a promise."""
    try:
        process = load(ProcessSettings, environ)
        logs.configure(process.log_format, process.log_level)
        failpoints.arm(process.failpoints)
        if until_idle and not process.run_id:
            raise SettingsError("TOKENHAUL_RUN_ID is not set: --until-idle waits for the idle mark of that run")
        service = make(environ)
        _collect_less()
        asyncio.run(_main(service, process, until_idle))
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"tokenhaul: {line}", file=sys.stderr)
        return error.status
    except Stopped:
        return Stopped.status
    except TokenhaulError as error:
        log.critical("%s", error, extra={"action": "fatal"})
        return error.status
    except Exception:
        log.critical("unexpected error", exc_info=True, extra={"action": "fatal"})
        return 1
    return 0


async def _main(service: Service, process: ProcessSettings, until_idle: bool) -> None:
    context = Context(process, until_idle=until_idle)

    def stop(signal_name: str) -> None:
        log.info("%s: finishing what is in flight", signal_name, extra={"action": "stop"})
        context.stopping.set()

    service.metrics.ready.set_function(lambda: not context.health.not_ready)
    with signals.on_stop(stop):
        try:
            probes = await health_server.serve(
                context.health, service.metrics.registry, process.metrics_host, process.metrics_port
            )
        except OSError as error:
            address = f"TOKENHAUL_METRICS_HOST:PORT {process.metrics_host}:{process.metrics_port}"
            raise Fatal(f"cannot listen on {address}: {error.strerror}") from error
        try:
            await context.run(service.run(context))
        finally:
            await probes.cleanup()
