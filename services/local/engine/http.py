"""SGLang's HTTP contract on top of a model: the routes, and the way in and out of `POST /generate`.

The local engine and the fake of the tests are this server with two different models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from services.local.engine import answer
from services.local.engine.errors import Poison, Refusal
from services.local.engine.info import InfoRoutes
from services.local.engine.jobs import Job, Jobs, Model, Observer
from services.local.engine.metrics import EngineMetrics
from services.local.engine.request import Call, admit, decode

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024 * 1024
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}
INTERNAL_ERROR = "Internal Server Error"
FAILURE = {"error": {"message": INTERNAL_ERROR, "type": "internal_error", "code": 500, "retryable": True}}


class EngineServer:
    """One engine: its model, its jobs, its metrics and the web application in front of them."""

    def __init__(self, model: Model, slots: int, max_queued: int | None, *observers: Observer) -> None:
        self.model = model
        # What /ready says. Requests are taken all the same: SGLang does so while it drains.
        self.ready = False
        metrics = EngineMetrics(model.facts.model)
        self.jobs = Jobs(model, slots, max_queued, [metrics, *observers])
        metrics.watch(self.jobs, model.facts.context_length * slots)
        info = InfoRoutes(model, self.jobs, metrics, lambda: self.ready)
        self.app = web.Application(middlewares=[_error_bodies], client_max_size=MAX_BODY_BYTES)
        self.app.router.add_routes(
            [
                web.post("/generate", self.generate),
                web.put("/generate", self.generate),
                web.post("/abort_request", self.abort_request),
                *info.routes(),
            ]
        )
        # A client that goes away cancels its handler, and so its generation.
        self.runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=5)

    async def start(self, host: str, port: int) -> str:
        """Listen and return the URL; port 0 takes a free one."""
        await self.runner.setup()
        await web.TCPSite(self.runner, host, port).start()
        return f"http://{host}:{self.runner.addresses[-1][1]}"

    async def stop(self) -> None:
        """Stop listening, let answers go out, close the connections."""
        await self.runner.cleanup()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST and PUT /generate."""
        fields = decode(await request.read(), request.headers.get("content-type"))
        try:
            call = admit(fields, self.model.facts, self.model.encode)
            for generation in call.generations:
                self.model.check(generation)
        except Refusal as refusal:
            if isinstance(refusal, Poison) or not fields.get("stream"):
                raise
            return await send_stream(request, refusal_stream(refusal, []))
        return await self.answer(request, call)

    async def answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Generate what was asked for and send it, whole or as a stream."""
        if call.stream:
            return await send_stream(request, self.events(call))
        return web.Response(body=await self.body(call), content_type="application/json")

    async def body(self, call: Call) -> bytes:
        """The JSON answer to a call that is no stream."""
        jobs = self.jobs.submit(call.generations)
        await self.jobs.wait(jobs)
        for job in jobs:
            if job.error is not None:
                raise RuntimeError(f"the generation of {job.generation.rid} failed") from job.error
        answers = [self.render(job) for job in jobs]
        return msgspec.json.encode(answers if call.as_list else answers[0])

    async def events(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The events of a stream: after the first id, after every `stream_interval` more, and at the end."""
        progress: asyncio.Queue[tuple[Job, int, bool]] = asyncio.Queue()

        def report(job: Job, count: int) -> None:
            progress.put_nowait((job, count, job.done.is_set()))

        try:
            jobs = self.jobs.submit(call.generations, report)
        except Refusal as refusal:
            async for event in refusal_stream(refusal, [generation.rid for generation in call.generations]):
                yield event
            return
        index = {job: {"index": number} if call.as_list else {} for number, job in enumerate(jobs)}
        try:
            left = len(jobs)
            while left:
                job, count, done = await progress.get()
                if done:
                    left -= 1
                    if job.error is not None:
                        log.error("the generation of %s failed", job.generation.rid, exc_info=job.error)
                    yield _event({**self.render(job), **index[job]} if job.error is None else FAILURE)
                elif (count - 1) % job.generation.sampling.stream_interval == 0:
                    yield _event({**answer.chunk(job, count, self.model.decode), **index[job]})
        finally:
            self.jobs.cancel(jobs)
        yield b"data: [DONE]\n\n"

    def render(self, job: Job) -> dict[str, Any]:
        """The answer for one job that is done."""
        return answer.whole(job, self.model.decode)

    async def abort_request(self, request: web.Request) -> web.Response:
        """POST /abort_request: always 200 and empty, also for a request that is not there."""
        fields = decode_object(await request.read())
        if fields.get("abort_all"):
            self.jobs.abort("")
        elif fields.get("rid"):
            self.jobs.abort(str(fields["rid"]))
        return web.Response()


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object; raises Refusal for anything else."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Refusal.flat(400, "Bad Request", str(error)) from None
    return fields


async def send_stream(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send server-sent events as they come. If the client goes away the generator is closed."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    async with aclosing(events):
        await response.prepare(request)
        async for event in events:
            await response.write(event)
    await response.write_eof()
    return response


async def refusal_stream(refusal: Refusal, rids: list[str]) -> AsyncGenerator[bytes, None]:
    """The events of a stream that is refused."""
    for body in answer.refusal_events(refusal, rids):
        yield _event(body)
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@web.middleware
async def _error_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The bodies SGLang (FastAPI) gives to errors, in place of aiohttp's."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return web.json_response(refusal.body, status=refusal.status)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return web.json_response({"detail": error.reason}, status=405, headers={"allow": allowed})
    except web.HTTPNotFound as error:
        return web.json_response({"detail": error.reason}, status=404)
    except (web.HTTPException, ConnectionError):
        raise  # the latter: the client went away while something was written to it
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return web.Response(status=500, text=INTERNAL_ERROR)
