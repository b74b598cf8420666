"""Failed prompts asked again by command: all of a command or nothing of it, and never twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas import ids
from schemas.control import Control, Dataset, Replay, replay_key
from schemas.dead import DeadLetter
from schemas.prompts import Prompt
from services.ingest import replay
from services.kernel import control, topics
from services.kernel.codec import Decoder, Encoder
from services.kernel.kafka import Kafka
from tests.support.ingest import FakeKafka, following
from tests.support.stream import make_prompt
from tests.unit.test_ingest_regenerate import PARTITIONS, kafka_with, prompts_on, put, run_ingest


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(kafka: Kafka) -> Dataset:
        return Dataset(name="d", model="fake", partitions=PARTITIONS, created_at=0.0)

    monkeypatch.setattr(topics, "check", check)
    monkeypatch.setattr(control, "following", following)
    monkeypatch.setattr(replay, "_COMMANDS_AT_ONCE", 2)


def bury(kafka: FakeKafka, prompt: Prompt, *, with_prompt: bool = True) -> None:
    """The dead letter of a failed prompt."""
    letter = DeadLetter(
        stage="generator", reason="engine_rejected", detail="no", source="test", id=prompt.id,
        prompt=prompt if with_prompt else None, created_at=1.0,
    )  # fmt: skip
    put(kafka, "dead", Encoder().encode(letter), key=prompt.id)


def give(kafka: FakeKafka, name: str, prompts: list[Prompt]) -> None:
    command = Replay(command=name, ids=b"".join(prompt.id for prompt in prompts), created_at=2.0)
    put(kafka, "control", Encoder().encode(command), key=replay_key(name))


def done(kafka: FakeKafka) -> dict[str, tuple[int, int]]:
    """{command: (prompts asked again, ids without a letter)}"""
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    found = [decoder.decode(record.value) for record in kafka.topic("control")]
    return {m.command: (m.done.prompts, m.done.missing) for m in found if isinstance(m, Replay) and m.done}


@pytest.mark.parametrize("answer_lost", [False, True], ids=["not taken", "taken, answer lost"])
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_every_prompt_is_asked_again_once_under_its_own_id(
    tmp_path: Path, failing: int, answer_lost: bool
) -> None:
    prompts = [make_prompt(number) for number in range(9)]
    kafka = kafka_with(prompts, *[None] * failing, KafkaTimeoutError(), answer_lost=answer_lost)
    for prompt in prompts:
        bury(kafka, prompt, with_prompt=prompt is not prompts[8])
    for number in range(3):
        give(kafka, f"c{number}", prompts[3 * number : 3 * number + 3])
    await run_ingest(kafka, tmp_path)
    again = prompts_on(kafka)[9:]
    assert sorted(prompt.id for prompt in again) == sorted(prompt.id for prompt in prompts[:8])
    for prompt in again:
        old = next(each for each in prompts if each.id == prompt.id)
        assert prompt.created_at > old.created_at, "a cancellation of before does not concern it"
        assert msgspec.structs.replace(prompt, created_at=old.created_at) == old
    for record in kafka.topic("prompts")[9:]:
        assert record.partition == ids.partition(dict(record.headers)["id"], PARTITIONS)
    assert done(kafka) == {"c0": (3, 0), "c1": (3, 0), "c2": (2, 1)}
    await run_ingest(kafka, tmp_path)
    assert len(prompts_on(kafka)) == 9 + 8, "what is done is not done again"
