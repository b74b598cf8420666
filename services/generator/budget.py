"""Budgets of the whole group: how much it may generate before somebody says `tokenhaul resume`.

Every generator writes to control what it has made; each adds all of that up, and the first to see that a limit is
reached writes the halt, which all obey and which survives a restart. What is in flight then is finished: dropping it
would keep the short outputs and lose the long ones.
"""

from __future__ import annotations

import time
import uuid

from schemas.control import HALT_KEY, Halt, Spent, spent_key
from schemas.sequences import Outcome, Sequence
from services.generator.settings import GeneratorSettings
from services.kernel.codec import Encoder, schema_of
from services.kernel.control import ControlView
from services.kernel.publisher import Publisher


class Budget:
    """This process's part of it. `instance`: its name among the generators, if it keeps one over restarts."""

    def __init__(
        self, settings: GeneratorSettings, view: ControlView, publisher: Publisher, topic: str, instance: str
    ) -> None:
        self._settings, self._view, self._publisher, self._topic = settings, view, publisher, topic
        self._encoder = Encoder()
        self._limited = bool(settings.max_rows or settings.max_output_tokens or settings.max_hours)
        self._member = instance or uuid.uuid4().hex
        self._obeyed = False
        self._told: Spent | None = None
        self._start(view.halt.epoch)

    @property
    def halted(self) -> bool:
        """No prompt may be taken in."""
        return self._view.halt.halted

    @property
    def stopped(self) -> bool:
        """Halted, nothing in flight any more, and all have been told."""
        return self.halted and self._told is not None and self._told.stopped

    def closed(self) -> bool:
        """Whether no prompt may be taken in; asked before each poll. Only what was answered here is told to others."""
        self._obeyed = self.halted
        return self._obeyed

    def add(self, outcome: Outcome) -> None:
        """An outcome is on its topic."""
        if isinstance(outcome, Sequence):
            self._rows += 1
            self._output_tokens += len(outcome.output_ids)

    async def begin(self) -> None:
        """Before the first prompt: whoever waits for the group to stop must know of this process."""
        if self._limited:
            await self._tell(stopped=False)

    async def tick(self, in_flight: int) -> None:
        """Tell what was made, and halt the group if that is enough. Nothing is told where no budget is set."""
        if self._view.halt.epoch != self._epoch:
            self._start(self._view.halt.epoch)
        if not (self._limited or self.halted):
            return
        await self._tell(stopped=self.halted and self._obeyed and not in_flight)
        reason = self._exceeded(self._view.spent())
        if reason and not self.halted:
            await self._write(HALT_KEY, Halt(halted=True, epoch=self._epoch, reason=reason, created_at=time.time()))

    async def _tell(self, *, stopped: bool) -> None:
        mine = Spent(
            member=self._member,
            epoch=self._epoch,
            rows=self._rows,
            output_tokens=self._output_tokens,
            since=self._since,
            stopped=stopped,
        )
        if mine != self._told:
            await self._write(spent_key(self._member), mine)
            self._told = mine
            self._view.update(spent_key(self._member), mine)

    def _start(self, epoch: int) -> None:
        """Count from nothing, or from where the process of this name was when it ended in this epoch."""
        before = next((spent for spent in self._view.spent() if spent.member == self._member), None)
        self._epoch = epoch
        self._rows = before.rows if before else 0
        self._output_tokens = before.output_tokens if before else 0
        self._since = before.since if before else time.time()

    def _exceeded(self, spent: list[Spent]) -> str:
        """Which limit is reached; empty when none is."""
        settings = self._settings
        made = {
            "max_rows": sum(each.rows for each in spent),
            "max_output_tokens": sum(each.output_tokens for each in spent),
            "max_hours": (time.time() - min(each.since for each in spent)) / 3600,
        }
        for name, value in made.items():
            limit = getattr(settings, name)
            if limit and value >= limit:
                return f"{name} {limit:g} reached: {value:g}"
        return ""

    async def _write(self, key: bytes, message: Spent | Halt) -> None:
        await self._publisher.publish(
            self._topic, self._encoder.encode(message), key=key, headers=[("schema", schema_of(message))]
        )
