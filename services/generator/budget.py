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
    """This process's part of it."""

    def __init__(self, settings: GeneratorSettings, view: ControlView, publisher: Publisher, topic: str) -> None:
        self._settings, self._view, self._publisher, self._topic = settings, view, publisher, topic
        self._encoder = Encoder()
        self._member = uuid.uuid4().hex
        self._begin(view.halt.epoch)
        self._told: Spent | None = None

    @property
    def halted(self) -> bool:
        """No prompt may be taken in."""
        return self._view.halt.halted

    def add(self, outcome: Outcome) -> None:
        """An outcome is on its topic."""
        if isinstance(outcome, Sequence):
            self._rows += 1
            self._output_tokens += len(outcome.output_ids)

    async def tick(self) -> None:
        """Tell what was made, and halt the group if that is enough. Does nothing where no budget is set."""
        if not (self._settings.max_rows or self._settings.max_output_tokens or self._settings.max_hours):
            return
        if self._view.halt.epoch != self._epoch:
            self._begin(self._view.halt.epoch)
        mine = Spent(
            member=self._member,
            epoch=self._epoch,
            rows=self._rows,
            output_tokens=self._output_tokens,
            since=self._since,
        )
        if mine != self._told:
            await self._write(spent_key(self._member), mine)
            self._told = mine
        reason = self._exceeded([spent for spent in self._view.spent() if spent.member != self._member] + [mine])
        if reason and not self.halted:
            await self._write(HALT_KEY, Halt(halted=True, epoch=self._epoch, reason=reason, created_at=time.time()))

    def _begin(self, epoch: int) -> None:
        self._epoch, self._rows, self._output_tokens, self._since = epoch, 0, 0, time.time()

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
