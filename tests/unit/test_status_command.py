"""`tokenhaul status` while Kafka has trouble. What it tells: tests/integration/test_operations.py."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, NodeNotReadyError

from services.cli import main
from services.operations.status import Status
from services.operations.watcher import Watcher

SEEN = Status(
    at=0.0, dataset="d", model="m", halted=None, sources={}, engines={}, partitions={}, dead={},
    waiting_prompts=7, waiting_outcomes=0,
)  # fmt: skip


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the next looks come to; the last one for all that follow."""
    found: list[Any] = [SEEN]

    async def look(watcher: Watcher) -> Status:
        answer = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(answer, KafkaError):
            raise answer
        assert isinstance(answer, Status)
        return answer

    monkeypatch.setattr(Watcher, "look", look)
    monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    return found


def test_a_broker_that_goes_ends_no_look(answers: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers[:0] = [NodeNotReadyError(), SEEN, NodeNotReadyError()]
    assert main(["status", "--json", "--every", "0"]) == 0
    assert '"waiting_prompts":7' in capsys.readouterr().out


def test_what_kafka_forbids_is_said_in_a_line(answers: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers[:] = [GroupAuthorizationFailedError("t.generator")]
    assert main(["status", "--json"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tokenhaul: Kafka: GroupAuthorizationFailedError")
