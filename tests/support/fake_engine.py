"""A fake SGLang for fault tests: the local engine's server with a model that is a pure function.

    async with FakeEngine(slots=8) as engine:
        engine.script(None, Abort(after=3), Drop())  # one step per request, then no more faults
        engine.script(lambda call: Hang() if call.stream else None)  # asked every time
        ...
        assert [request.rid for request in engine.started] == [...]
        assert row.output_ids == expected_output(prompt_ids, {"max_new_tokens": 64})

`python -m tests.support.fake_engine --port 0 --log FILE` runs it as a process: it prints {"url": ...} and
takes its script as JSON from --script or POST /fake/script, e.g. [null, {"type": "Abort", "after": 3}].

Like a real server it dies, with everything in flight, of an id outside the vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import os
import random
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self, cast

import msgspec
from aiohttp import web

from services.generator.sglang import CHECK
from services.local.engine import command as engine
from services.local.engine.errors import Poison, Refusal
from services.local.engine.http import STREAM_HEADERS, EngineServer, refusal_stream, send_stream
from services.local.engine.jobs import ABORTED, Job, Segment
from services.local.engine.llama import load_tokenizer
from services.local.engine.request import Call, Facts, Generation, admit
from services.local.engine.sampling import read_sampling
from services.local.engine.stops import StopCheck, stopped

FACTS = Facts("fake", "0.5.23", vocab_size=49152, context_length=8192, eos_ids=frozenset({2}))
OUTPUT_TOKENS = 24
KILLED = 137


class Fault(msgspec.Struct, tag=True):
    """What goes wrong with one request."""


class Latency(Fault):
    """It takes `seconds` longer, in its slot."""

    seconds: float


class Hang(Fault):
    """It never ends by itself; its slot stays taken until the client goes away or aborts it."""


class Drip(Fault):
    """The answer comes in `pieces`, `seconds` apart; a stream event by event."""

    seconds: float
    pieces: int = 8


class Reset(Fault):
    """The connection breaks in the middle of the body."""


class Drop(Fault):
    """The connection breaks without an answer."""


class Death(Fault):
    """The whole engine stops: everything in flight is dropped, nobody listens any more."""


class QueueFull(Fault):
    """503, as with --max-queued-requests."""


class BadRequest(Fault):
    """400 in one of SGLang's three body shapes."""

    shape: Literal["object", "string", "flat"] = "object"


class Status(Fault):
    """Any other answer, as a router or a proxy gives it."""

    status: int
    body: str = ""
    headers: dict[str, str] = {}


class Abort(Fault):
    """200, finish_reason abort and the first ids only."""

    after: int = 3


class Capped(Fault):
    """finish_reason length with fewer ids than were asked for: a small KV pool does so silently."""

    at: int = 3


class NaN(Fault):
    """A stop that matched "NaN happened", its last id overwritten with an eos."""


class PromptPrefix(Fault):
    """The first ids of the prompt stand in front of the output (sglang#17240)."""

    count: int = 3


class OutOfRange(Fault):
    """The last id lies beyond the vocabulary."""


class NoOutputIds(Fault):
    """No output_ids, as an old server without --skip-tokenizer-init."""


class CompletionTokens(Fault):
    """completion_tokens is wrong."""

    off_by: int = 1


class PromptTokens(Fault):
    """prompt_tokens is wrong, as with --allow-auto-truncate."""

    off_by: int = -1


AnyFault = (
    Latency | Hang | Drip | Reset | Drop | Death | QueueFull | BadRequest | Status | Abort | Capped | NaN
    | PromptPrefix | OutOfRange | NoOutputIds | CompletionTokens | PromptTokens
)  # fmt: skip
Step = Fault | None | Callable[[Call], Fault | None]


class Started(msgspec.Struct, frozen=True, tag=True):
    """A sequence that was asked for, sampling_params as they were sent, and what was scripted for it."""

    rid: str
    input_ids: list[int]
    sampling_params: Any
    fault: str | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A sequence as it was generated; a fault may have changed it on its way out."""

    rid: str
    input_ids: list[int]
    output_ids: list[int]
    finish_reason: dict[str, Any] | None


def expected_output(
    input_ids: list[int],
    sampling_params: dict[str, Any] | None = None,
    *,
    sample: int = 0,
    facts: Facts = FACTS,
    output_tokens: int = OUTPUT_TOKENS,
) -> list[int]:
    """The output_ids the fake gives to this request; `sample` is the index within an n."""
    request = {"input_ids": input_ids, "sampling_params": read_sampling(sampling_params)}
    generation = admit(request, facts, _bytes).generations[sample]
    check = StopCheck(generation, facts.eos_ids, _numbers)
    ids, _ = check.cut([], _sequence(generation, facts, output_tokens))
    return ids


class FakeModel:
    """A model (jobs.Model) that takes no time but what it is told to."""

    def __init__(
        self,
        facts: Facts,
        output_tokens: int = OUTPUT_TOKENS,
        token_seconds: float = 0.0,
        latency: Callable[[Generation], float] | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        self.facts = facts
        self.delays: dict[str, float] = {}  # seconds more, by rid
        self._output_tokens = output_tokens
        self._token_seconds = token_seconds
        self._latency = latency or (lambda _: 0.0)
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)

    async def load(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to give back."""

    async def healthy(self) -> bool:
        """A fake is well as long as it listens."""
        return True

    def check(self, generation: Generation) -> None:
        """It does everything."""

    def choose_slot(self, free: Collection[int], prompt_ids: list[int]) -> int:
        """Any."""
        return next(iter(free))

    def encode(self, text: str) -> list[int]:
        """The tokenizer's ids; without one, one per byte."""
        return _bytes(text) if self._tokenizer is None else list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The tokenizer's text; without one, the numbers."""
        if self._tokenizer is None:
            return _numbers(ids, skip_special_tokens)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def generate(self, generation: Generation, slot: int) -> AsyncGenerator[Segment, None]:
        """All ids at once, or one by one if a token takes time."""
        if seconds := self._latency(generation) + self.delays.get(generation.rid, 0.0):
            await asyncio.sleep(seconds)
        ids = _sequence(generation, self.facts, self._output_tokens)
        size = 1 if self._token_seconds else len(ids)
        for start in range(0, len(ids), size):
            if self._token_seconds:
                await asyncio.sleep(self._token_seconds)
            part = ids[start : start + size]
            logprobs = [-(token % 89) / 89 for token in part] if generation.return_logprob else []
            yield Segment(part, logprobs=logprobs)


class FakeEngine(EngineServer):
    """An engine in this process. `ready` and `gives_ids` may be set; `started` and `ended` fill without a `record`, and
    `ended_at` with when each of them did (time.monotonic)."""

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        slots: int = 64,
        max_queued: int | None = None,
        record: Callable[[Started | Ended], None] | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.fake = model or FakeModel(FACTS)
        super().__init__(self.fake, slots, max_queued, self)
        self.ready = self.gives_ids = True
        self.url = ""
        self.started: list[Started] = []
        self.ended: list[Ended] = []
        self.ended_at: list[float] = []
        self._record = record or self._keep
        self._on_death = on_death
        self._steps: deque[Step] = deque()
        self._faults: dict[str, Fault] = {}
        self.app.router.add_post("/fake/script", self._take_script)
        self.app.router.add_post("/fake/ready", self._take_ready)

    async def __aenter__(self) -> Self:
        self.url = await self.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop_listening()
            await self._drop_everything()
        finally:
            await self.stop()

    def script(self, *steps: Step) -> None:
        """What goes wrong from now on: one step per valid request, a callable for all that follow it."""
        self._steps = deque(steps)

    async def die(self) -> None:
        """Drop what is in flight and stop listening, as a killed server does."""
        if self._on_death is not None:
            self._on_death()
        await self._stop_listening()
        await self._drop_everything()

    async def revive(self) -> None:
        """Listen again at the same URL."""
        port = int(self.url.rpartition(":")[2])
        await web.TCPSite(self.runner, "127.0.0.1", port, reuse_address=True).start()

    def generated(self, count: int) -> None:
        """Not of interest (jobs.Observer)."""

    def finished(self, job: Job) -> None:
        """Note the end of a sequence (jobs.Observer)."""
        generation = job.generation
        ended = Ended(generation.rid, generation.prompt_ids, list(job.output_ids), job.finish_reason)
        self._record(ended)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """As the real one, except that it dies of poison."""
        try:
            return await super().generate(request)
        except Poison:
            await self.die()
            return _cut(request)

    async def answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Take the next step of the script, note what was asked, and answer. A generator's question whether there are
        output_ids is no generation that tests count."""
        if call.generations[0].rid.startswith(CHECK):
            finish = {"type": "length", "length": 1}
            meta = {"id": call.generations[0].rid, "finish_reason": finish, "prompt_tokens": 1, "completion_tokens": 1}
            ids = {"output_ids": [3]} if self.gives_ids else {}
            return web.json_response({"text": "", "meta_info": meta, **ids})
        fault = self._next(call)
        sent = msgspec.json.decode(await request.read()).get("sampling_params")
        name = None if fault is None else type(fault).__name__
        for generation in call.generations:
            self._record(Started(generation.rid, generation.prompt_ids, sent, name))
            if fault is not None:
                self._faults[generation.rid] = fault
        try:
            return await self._answer(request, call, fault)
        finally:
            for generation in call.generations:
                self._faults.pop(generation.rid, None)
                self.fake.delays.pop(generation.rid, None)

    def render(self, job: Job) -> dict[str, Any]:
        """The answer, changed as the script says."""
        fault = self._faults.get(job.generation.rid)
        return altered(super().render(job), fault, job.generation.prompt_ids, self.fake.facts)

    async def _answer(self, request: web.Request, call: Call, fault: Fault | None) -> web.StreamResponse:
        match fault:
            case Drop():
                return _cut(request)
            case Death():
                await self.die()
                return _cut(request)
            case Status(status, body, headers):
                return web.Response(status=status, text=body, headers=headers)
            case BadRequest(shape):
                raise _bad_request(shape)
            case QueueFull() if call.stream:
                rids = [generation.rid for generation in call.generations]
                return await send_stream(request, refusal_stream(Refusal.queue_full(), rids))
            case QueueFull():
                raise Refusal.queue_full()
            case Drip() | Reset():
                return await self._send_slowly(request, call, fault)
            case Hang() | Latency():
                seconds = math.inf if isinstance(fault, Hang) else fault.seconds
                self.fake.delays |= {generation.rid: seconds for generation in call.generations}
        return await super().answer(request, call)

    async def _send_slowly(self, request: web.Request, call: Call, fault: Drip | Reset) -> web.StreamResponse:
        """In pieces of the body, or event by event; a reset cuts after the first."""
        headers = {"content-type": "application/json"}
        if call.stream:
            headers, pieces = STREAM_HEADERS, [event async for event in self.events(call)]
        else:
            body = await self.body(call)
            size = -(-len(body) // (fault.pieces if isinstance(fault, Drip) else 2))
            headers["content-length"] = str(len(body))
            pieces = [body[start : start + size] for start in range(0, len(body), size)]
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            if isinstance(fault, Reset):
                return _cut(request)
            await asyncio.sleep(fault.seconds)
        await response.write_eof()
        return response

    def _next(self, call: Call) -> Fault | None:
        if not self._steps:
            return None
        step = self._steps[0]
        if step is None or isinstance(step, Fault):
            self._steps.popleft()
            return step
        return step(call)

    def _keep(self, entry: Started | Ended) -> None:
        if isinstance(entry, Started):
            self.started.append(entry)
        else:
            self.ended.append(entry)
            self.ended_at.append(time.monotonic())

    async def _stop_listening(self) -> None:
        """Take no new connections. What is accepted already gets its turns first, until aiohttp knows of it: asyncio
        leaves a socket open whose server was closed before it had its transport (CPython issue 109564)."""
        loop = asyncio.get_running_loop()
        sites = list(self.runner.sites)
        for site in sites:
            server = cast("asyncio.Server | None", cast("web.TCPSite", site)._server)
            for listening in server.sockets if server is not None else ():
                loop.remove_reader(listening.fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        for site in set(sites) & set(self.runner.sites):  # another death may have come first
            await site.stop()

    async def _drop_everything(self) -> None:
        self.jobs.abort("")
        server = self.runner.server
        for connection in server.connections if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()

    async def _take_script(self, request: web.Request) -> web.Response:
        self.script(*msgspec.json.decode(await request.read(), type=list[AnyFault | None]))
        return web.Response()

    async def _take_ready(self, request: web.Request) -> web.Response:
        self.ready = msgspec.json.decode(await request.read(), type=bool)
        return web.Response()


def altered(
    answer: dict[str, Any],
    fault: Fault | None,
    prompt_ids: list[int],
    facts: Facts,
) -> dict[str, Any]:
    """An answer as a fault changes it; faults that are not in the answer leave it as it is."""
    ids, meta = list(answer["output_ids"]), dict(answer["meta_info"])
    match fault:
        case Abort(after):
            ids = ids[:after]
            meta |= {"finish_reason": ABORTED, "completion_tokens": len(ids)}
        case Capped(at):
            ids = ids[:at]
            meta |= {"finish_reason": {"type": "length", "length": len(ids)}, "completion_tokens": len(ids)}
        case NaN():
            ids[-1] = min(facts.eos_ids)
            meta["finish_reason"] = stopped("NaN happened")
        case PromptPrefix(count):
            ids = prompt_ids[:count] + ids
        case OutOfRange():
            ids[-1] = facts.vocab_size
        case CompletionTokens(off_by):
            meta["completion_tokens"] += off_by
        case PromptTokens(off_by):
            meta["prompt_tokens"] += off_by
    changed = {**answer, "output_ids": ids, "meta_info": meta}
    if isinstance(fault, NoOutputIds):
        del changed["output_ids"]
    return changed


def _sequence(generation: Generation, facts: Facts, output_tokens: int) -> list[int]:
    """The ids a prompt gets, up to its own eos (ignore_eos goes on behind it) or the limit."""
    sampling = generation.sampling
    variant = (None, 0) if sampling.greedy else (sampling.sampling_seed, generation.sample)
    key = array("q", generation.prompt_ids).tobytes() + repr(variant).encode()
    chance = random.Random(blake2b(key, digest_size=16).digest())
    length = max(1, chance.randint(output_tokens // 2, output_tokens * 3 // 2), sampling.min_new_tokens + 1)
    count = generation.limit if sampling.ignore_eos else min(generation.limit, length)
    avoided = facts.eos_ids | (sampling.stop_ids if sampling.min_new_tokens else frozenset())
    other = next(token for token in range(facts.vocab_size) if token not in avoided)
    drawn = [number % facts.vocab_size for number in array("I", chance.randbytes(4 * count))]
    ids = [other if token in avoided else token for token in drawn]
    if length <= count:
        ids[length - 1] = min(facts.eos_ids)
    return ids


def _bad_request(shape: str) -> Refusal:
    message = "a scripted refusal"
    if shape == "flat":
        return Refusal.flat(400, "Bad Request", message)
    return Refusal.value(message) if shape == "object" else Refusal.contract(message)


def _bytes(text: str) -> list[int]:
    return [256 + byte for byte in text.encode()]


def _numbers(ids: list[int], skip_special_tokens: bool) -> str:
    return "".join(f" {token}" for token in ids if not (skip_special_tokens and token in FACTS.eos_ids))


def _cut(request: web.Request) -> web.Response:
    """Break the connection. The response goes nowhere, aiohttp only wants one."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _lognormal(median: float, sigma: float) -> Callable[[Generation], float]:
    """Seconds that depend on the prompt alone, so that runs can be compared."""

    def seconds(generation: Generation) -> float:
        chance = random.Random(array("q", generation.prompt_ids).tobytes())
        return median * math.exp(chance.gauss(0, sigma)) if median else 0.0

    return seconds


def main() -> int:
    """The fake as a process. It drains on a signal as the local engine does; dying it exits with 137."""
    parser = argparse.ArgumentParser(description="A fake SGLang.")
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0)
    add("--slots", type=int, default=64)
    add("--max-queued", type=int)
    add("--context", type=int, default=FACTS.context_length)
    add("--vocab-size", type=int, default=FACTS.vocab_size)
    add("--output-tokens", type=int, default=OUTPUT_TOKENS, help="of a sequence, on average")
    add("--token-seconds", type=float, default=0.0, help="per id")
    add("--latency", type=float, default=0.0, help="seconds before the first id, the median")
    add("--latency-sigma", type=float, default=0.0, help="of the log-normal distribution")
    add("--tokenizer", type=Path, help="directory with a tokenizer.json")
    add("--script", default="[]", help="steps as a JSON list")
    add("--log", type=Path, help="file for one JSON line per start and end of a sequence")
    args = parser.parse_args()
    facts = dataclasses.replace(FACTS, context_length=args.context, vocab_size=args.vocab_size)
    latency = _lognormal(args.latency, args.latency_sigma)
    model = FakeModel(facts, args.output_tokens, args.token_seconds, latency, args.tokenizer)
    with ExitStack() as stack:
        log = None if args.log is None else stack.enter_context(args.log.open("ab", buffering=0))
        if log is not None and log.tell():
            log.write(b"\n")  # after a line that a kill has cut short

        def record(entry: Started | Ended) -> None:
            if log is not None:
                # The time is of this line, not of the entry: only who reads the file asks for it.
                log.write(b'{"at":%.6f,' % time.time() + msgspec.json.encode(entry)[1:] + b"\n")

        async def run() -> None:
            fake = FakeEngine(
                model,
                slots=args.slots,
                max_queued=args.max_queued,
                record=record,
                on_death=lambda: os._exit(KILLED),
            )
            fake.ready = False
            fake.script(*msgspec.json.decode(args.script, type=list[AnyFault | None]))
            await engine.serve(fake, args.host, args.port)

        asyncio.run(run())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
