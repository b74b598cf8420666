"""`tokenhaul dead replay|drop`: which letters they settle. With Kafka: tests/integration/test_operations.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console

from schemas import ids
from schemas.control import Drop, Replay
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.operations import dead_command
from services.operations.letters import Letter, Settled

KEY = bytes(ids.ID_BYTES)


@pytest.mark.parametrize("action", [dead_command._replay, dead_command._drop])
@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_clocks_that_differ_neither_keep_a_letter_nor_hide_the_next(
    monkeypatch: pytest.MonkeyPatch, action: Callable[..., None], ahead: float
) -> None:
    written: list[msgspec.Struct] = []

    async def write(kafka: Kafka, messages: Sequence[tuple[bytes, Any]]) -> None:
        written.extend(message for _, message in messages)

    monkeypatch.setattr(dead_command, "_write", write)
    failed = time.time() + ahead  # by the clock of the generator
    letter = Letter(stage="generator", reason="engine_rejected", detail="", id=KEY, created_at=failed, has_prompt=True)
    kafka = Kafka(KafkaSettings(bootstrap=["127.0.0.1:9092"]))
    action(kafka, {KEY: letter}, Console(quiet=True), really=True)
    (command,) = written
    assert isinstance(command, Replay | Drop)
    settled = Settled({KEY: command.created_at})
    assert settled.holds(KEY, letter)
    assert not settled.holds(KEY, msgspec.structs.replace(letter, created_at=failed + 1)), "it failed again"
