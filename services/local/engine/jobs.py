"""What the engine works on: `slots` sequences at a time, the others waiting in the order they came."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from services.local.engine.errors import Refusal
from services.local.engine.request import Facts, Generation
from services.local.engine.stops import FinishReason, StopCheck

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True, slots=True)
class Segment:
    """Ids as the model sampled them, one or more, with their log probabilities when they were asked for.

    `cached_tokens` of what stood before them were not computed anew.
    """

    ids: list[int]
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)


class Model(Protocol):
    """What generates. It knows nothing of stops: it goes on until its generator is closed."""

    facts: Facts

    def check(self, generation: Generation) -> None:
        """Raise Refusal for what this model cannot do."""

    def choose_slot(self, free: Collection[int], prompt_ids: list[int]) -> int:
        """The free slot to run a prompt in, for instance the one that has its beginning in the cache."""

    def generate(self, generation: Generation, slot: int) -> AsyncGenerator[Segment, None]:
        """Segments, at most `generation.limit` ids in all. What it raises becomes the error of the job."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of ids."""

    async def load(self) -> None:
        """Make it ready to generate."""

    async def close(self) -> None:
        """Give back what `load` took."""

    async def healthy(self) -> bool:
        """Whether the model is loaded and answers."""


Listener = Callable[["Job", int], None]  # a job, and how many of its ids this is about


@dataclass(slots=True, eq=False)
class Job:
    """One sequence on its way. Times are seconds of the monotonic clock, 0 is not yet.

    At the end it has a finish reason, or the model's `error`.
    """

    generation: Generation
    on_progress: Listener | None
    received: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Observer(Protocol):
    """What is told of the work: metrics and logs."""

    def generated(self, count: int) -> None:
        """`count` ids more."""

    def finished(self, job: Job) -> None:
        """A job ended, well or not."""


class Jobs:
    """All jobs of the engine."""

    def __init__(
        self,
        model: Model,
        slots: int,
        max_queued: int | None,
        observers: Collection[Observer],
    ) -> None:
        self.slots = slots
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, asyncio.Task[FinishReason]] = {}
        self._model = model
        self.max_queued = max_queued
        self._observers = observers
        self._free = set(range(slots))
        self._by_rid: dict[str, Job] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, generations: list[Generation], on_progress: Listener | None = None) -> list[Job]:
        """Start or queue all of them, or raise Refusal and take none.

        `on_progress` is called after every id that does not end a job, and at its end.
        """
        rids: set[str] = set()
        for generation in generations:
            if generation.rid in self._by_rid or generation.rid in rids:
                raise Refusal.value(f"Duplicate request ID detected: {generation.rid}")
            rids.add(generation.rid)
        room = len(self._free) + (self.max_queued or 0) - len(self.waiting)
        if self.max_queued is not None and len(generations) > room:
            raise Refusal.queue_full()
        return [self._take(Job(generation, on_progress)) for generation in generations]

    async def wait(self, jobs: list[Job]) -> None:
        """Until all are done. Being cancelled (the client went away) aborts them: nobody wants them now."""
        try:
            for job in jobs:
                await job.done.wait()
        finally:
            self.cancel(jobs)

    def cancel(self, jobs: Collection[Job]) -> None:
        """Abort jobs; those that are done stay as they are."""
        for job in jobs:
            if job in self.running:
                self.running[job].cancel()
            elif not job.done.is_set():
                self.waiting.remove(job)
                job.finish_reason = ABORTED_IN_QUEUE
                self._finish(job)

    def abort(self, prefix: str) -> None:
        """Abort every job whose request id starts with `prefix`: as in SGLang "req-1" also hits "req-10"."""
        self.cancel([job for rid, job in self._by_rid.items() if rid.startswith(prefix)])

    async def idle(self) -> None:
        """Until nothing runs and nothing waits."""
        await self._idle.wait()

    @property
    def used_tokens(self) -> int:
        """Ids of prompts and outputs that are being worked on."""
        return sum(len(job.generation.prompt_ids) + len(job.output_ids) for job in self.running)

    def _take(self, job: Job) -> Job:
        self._by_rid[job.generation.rid] = job
        self._idle.clear()
        self.waiting.append(job)
        self._fill()
        return job

    def _fill(self) -> None:
        while self._free and self.waiting:
            job = self.waiting.popleft()
            slot = self._model.choose_slot(self._free, job.generation.prompt_ids)
            self._free.remove(slot)
            job.started = time.monotonic()
            task = asyncio.create_task(self._run(job, slot))
            # A callback and not a finally inside: a task cancelled before its first step never enters it.
            task.add_done_callback(partial(self._ended, job, slot))
            self.running[job] = task

    async def _run(self, job: Job, slot: int) -> FinishReason:
        check = StopCheck(job.generation, self._model.facts.eos_ids, self._model.decode)
        _, reason = check.cut([], [])
        if reason is not None:  # max_new_tokens 0
            return reason
        async with aclosing(self._model.generate(job.generation, slot)) as segments:
            async for segment in segments:
                if not job.first_token:
                    job.first_token = time.monotonic()
                    job.cached_tokens = segment.cached_tokens
                before = len(job.output_ids)
                ids, reason = check.cut(job.output_ids, segment.ids)
                job.output_ids += ids
                job.logprobs += segment.logprobs[: len(ids)]
                for observer in self._observers:
                    observer.generated(len(ids))
                if job.on_progress is not None:
                    for count in range(before + 1, len(job.output_ids) + (reason is None)):
                        job.on_progress(job, count)
                if reason is not None:
                    return reason
        raise RuntimeError(f"the model ended after {len(job.output_ids)} of {job.generation.limit} ids")

    def _ended(self, job: Job, slot: int, task: asyncio.Task[FinishReason]) -> None:
        del self.running[job]
        self._free.add(slot)
        if task.cancelled():
            job.finish_reason = ABORTED
        elif (error := task.exception()) is not None:
            job.error = error
        else:
            job.finish_reason = task.result()
        self._finish(job)
        self._fill()

    def _finish(self, job: Job) -> None:
        job.finished = time.monotonic()
        del self._by_rid[job.generation.rid]
        if not self._by_rid:
            self._idle.set()
        for observer in self._observers:
            observer.finished(job)
        job.done.set()
        if job.on_progress is not None:
            job.on_progress(job, len(job.output_ids))
