"""Prompts asked again by command: each once, whatever fails, and the command is done with the last of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas import ids
from schemas.control import Control, Dataset, Regenerate, regenerate_key
from schemas.prompts import Prompt
from services.ingest import regenerate, sources
from services.ingest.service import Ingest
from services.ingest.settings import IngestSettings
from services.kernel import control, topics
from services.kernel.codec import Decoder, Encoder
from services.kernel.errors import Fatal
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context, ProcessSettings
from tests.support.ingest import SMOLLM2, FakeKafka, chat, following
from tests.support.stream import make_prompt

PARTITIONS = 4


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(kafka: Kafka) -> Dataset:
        return Dataset(name="d", model="fake", partitions=PARTITIONS, created_at=0.0)

    monkeypatch.setattr(topics, "check", check)
    monkeypatch.setattr(control, "following", following)
    monkeypatch.setattr(regenerate, "_BATCH", 3)


def put(kafka: FakeKafka, topic: str, value: object, key: bytes | None = None, id: bytes | None = None) -> None:
    headers = [] if id is None else [("id", id)]
    record = SimpleNamespace(topic=topic, value=value, key=key, partition=0, headers=headers, offset=0)
    kafka.topic(topic).append(record)


def command(prompts: list[Prompt], revision: int = 1, max_new_tokens: int | None = None) -> Regenerate:
    packed = b"".join(prompt.id for prompt in prompts)
    return Regenerate(
        command=f"c{revision}", ids=packed, revision=revision, max_new_tokens=max_new_tokens, reason="r", created_at=1.0
    )


def give(kafka: FakeKafka, message: Regenerate) -> None:
    put(kafka, "control", Encoder().encode(message), key=regenerate_key(message.command))


def prompts_on(kafka: FakeKafka) -> list[Prompt]:
    return [Decoder(Prompt).decode(record.value) for record in kafka.topic("prompts")]


def last_command(kafka: FakeKafka) -> Regenerate:
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    found = [decoder.decode(record.value) for record in kafka.topic("control")]
    return [message for message in found if isinstance(message, Regenerate)][-1]


async def run_ingest(kafka: FakeKafka, folder: Path, asked: str = "max_new_tokens: 1") -> None:
    (folder / "s.jsonl").touch()
    file = folder / "sources.yaml"
    file.write_text(f"sources: [{{name: s, files: [s.jsonl], {asked}}}]")
    settings = IngestSettings(sources_file=str(file), tokenizer=str(SMOLLM2), backlog=0)
    service = Ingest(settings, kafka, sources.load(str(file)))
    context = Context(ProcessSettings(run_id="r"), until_idle=True)
    await context.run(service.run(context))


def kafka_with(prompts: list[Prompt], *answers: BaseException | None, answer_lost: bool = False) -> FakeKafka:
    kafka = FakeKafka(*answers, answer_lost=answer_lost)
    for prompt in prompts:
        put(kafka, "prompts", Encoder().encode(prompt), id=prompt.id)
    return kafka


@pytest.mark.parametrize("answer_lost", [False, True], ids=["not taken", "taken, answer lost"])
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_every_prompt_is_asked_again_once(tmp_path: Path, failing: int, answer_lost: bool) -> None:
    old = [make_prompt(number) for number in range(10)]
    answers = [None] * failing + [KafkaTimeoutError()]
    kafka = kafka_with(old, *answers, answer_lost=answer_lost)
    wanted, absent = old[:8], make_prompt(99)
    give(kafka, command([*wanted, absent], revision=3, max_new_tokens=256))
    await run_ingest(kafka, tmp_path)
    new = prompts_on(kafka)[10:]
    assert sorted(prompt.prompt_ids for prompt in new) == sorted(prompt.prompt_ids for prompt in wanted)
    for prompt in new:
        assert prompt.sampling == {**old[0].sampling, "max_new_tokens": 256}
        assert prompt.revision == 3
        assert prompt.id == ids.record_id(prompt.prompt_ids, "fake", prompt.sampling, 0, 3)
        assert prompt.seed == ids.seed(prompt.id)
    for record in kafka.topic("prompts")[10:]:
        id = dict(record.headers)["id"]
        assert record.partition == ids.partition(id, PARTITIONS)
    done = last_command(kafka)
    assert done.ids == b"", "compaction is to take the ids away"
    assert done.done
    assert (done.done.prompts, done.done.missing) == (8, 1)
    await run_ingest(kafka, tmp_path)
    assert len(prompts_on(kafka)) == 18, "what is done is not done again"


async def test_a_limit_beyond_the_context_is_clamped(tmp_path: Path) -> None:
    old = [make_prompt(1)]
    kafka = kafka_with(old)
    give(kafka, command(old, max_new_tokens=100_000))
    await run_ingest(kafka, tmp_path)
    again = prompts_on(kafka)[-1]
    assert (again.sampling["max_new_tokens"], again.clamped) == (8192 - 4, True)


async def test_without_a_limit_the_same_is_asked_and_still_another_record(tmp_path: Path) -> None:
    old = [make_prompt(1)]
    kafka = kafka_with(old)
    give(kafka, command(old))
    await run_ingest(kafka, tmp_path)
    give(kafka, command(prompts_on(kafka)[1:], revision=2))
    await run_ingest(kafka, tmp_path)
    found = prompts_on(kafka)
    assert [prompt.revision for prompt in found] == [0, 1, 2]
    assert len({prompt.id for prompt in found}) == 3
    assert all(prompt.sampling == old[0].sampling for prompt in found)


@pytest.mark.parametrize("answer_lost", [False, True], ids=["not taken", "taken, answer lost"])
async def test_what_is_asked_again_already_is_not_paid_for_twice(
    tmp_path: Path, answer_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    old = [make_prompt(number) for number in range(8)]
    kafka = kafka_with(old)
    give(kafka, command(old[:5]))
    await run_ingest(kafka, tmp_path)
    kafka.answers = [None, KafkaTimeoutError()]  # in the middle of the second command
    kafka.answer_lost = answer_lost
    give(kafka, command(old, revision=2, max_new_tokens=256))
    await run_ingest(kafka, tmp_path)
    found = prompts_on(kafka)
    asked = sorted((prompt.prompt_ids, prompt.revision) for prompt in found[8:])
    assert asked == sorted((prompt.prompt_ids, 1 if number < 5 else 2) for number, prompt in enumerate(old))
    done = last_command(kafka).done
    assert done
    assert (done.prompts, done.skipped, done.missing) == (3, 5, 0)
    assert "5 rows are not asked again" in caplog.text
    assert "not with 256" in caplog.text
    assert "0 rows are not" not in caplog.text


async def test_a_revision_raised_by_hand_is_above_those_of_commands(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(msgspec.json.encode(chat("Hi")) + b"\n")
    kafka = FakeKafka()
    await run_ingest(kafka, tmp_path)
    give(kafka, command(prompts_on(kafka), revision=2))
    await run_ingest(kafka, tmp_path)
    with pytest.raises(Fatal, match="raise its revision to 3 to ask everything anew"):
        await run_ingest(kafka, tmp_path, "max_new_tokens: 2")
    with pytest.raises(Fatal, match="raise it to 3 or more"):
        await run_ingest(kafka, tmp_path, "max_new_tokens: 2, revision: 2")
    await run_ingest(kafka, tmp_path, "max_new_tokens: 2, revision: 3")
    assert [prompt.revision for prompt in prompts_on(kafka)] == [0, 2, 3]
