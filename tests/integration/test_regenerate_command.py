"""`tokenhaul regenerate` on a real Kafka: what it writes, and what it refuses to write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from schemas.control import Control, Dataset, Regenerate, regenerate_key
from services.cli import main
from services.dataset import regenerate
from services.ingest import regenerate as ingest_regenerate
from services.ingest import sources
from services.ingest.service import Ingest
from services.ingest.settings import IngestSettings
from services.kernel import topics
from services.kernel.codec import Decoder, Encoder
from services.kernel.kafka import Kafka
from tests.support.datasets import append, sequences
from tests.support.ingest import SMOLLM2
from tests.support.stream import MODEL, PARTITIONS, create_topics, eventually, make_prompt, publish, running


async def commands(kafka: Kafka) -> list[Regenerate]:
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    found = [decoder.decode(record.value) async for record in kafka.read_all(kafka.topics.control)]
    return [message for message in found if isinstance(message, Regenerate)]


async def test_commands_hold_the_ids_in_parts_and_a_revision_of_their_own(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await create_topics(kafka)
    append(tmp_path, rows := sequences(5))
    monkeypatch.setattr(regenerate, "_IDS_PER_COMMAND", 2)
    monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", kafka.address)
    monkeypatch.setenv("TOKENHAUL_KAFKA_PREFIX", kafka.settings.prefix)
    words = ["regenerate", "--dataset", str(tmp_path), "--where"]
    assert await asyncio.to_thread(main, [*words, "source = test", "--dry-run"]) == 0
    assert await asyncio.to_thread(main, [*words, "source = nobody"]) == 0
    assert await commands(kafka) == []
    assert await asyncio.to_thread(main, [*words, "source = test", "--max-new-tokens", "99"]) == 0
    written = await commands(kafka)
    assert [len(each.ids) for each in written] == [32, 32, 16]
    packed = b"".join(each.ids for each in written)
    assert {packed[at : at + 16] for at in range(0, len(packed), 16)} == {row.record_id for row in rows}
    assert {(each.revision, each.max_new_tokens, each.reason) for each in written} == {(1, 99, "source = test")}
    assert await asyncio.to_thread(main, [*words, f"id = {rows[0].record_id.hex()}"]) == 0
    assert (await commands(kafka))[-1].revision == 2, "the answers to the first command may come later"
    assert "as revision 2" in capsys.readouterr().out


async def test_another_datasets_topics_are_refused(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Dataset(name="other", model=MODEL, partitions=PARTITIONS, created_at=1.0)
    await topics.create(kafka, other, replication=1, min_isr=1)
    append(tmp_path, sequences(2))
    monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", kafka.address)
    monkeypatch.setenv("TOKENHAUL_KAFKA_PREFIX", kafka.settings.prefix)
    words = ["regenerate", "--dataset", str(tmp_path), "--where", "source = test"]
    assert await asyncio.to_thread(main, words) == 2
    assert "belong to 'other': set TOKENHAUL_KAFKA_PREFIX" in capsys.readouterr().err
    assert await commands(kafka) == []


async def test_an_ingest_that_is_killed_in_the_middle_asks_every_prompt_once(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topics(kafka)
    await publish(kafka, asked := [make_prompt(number) for number in range(200)], batch=50)
    command = Regenerate(
        command="c", ids=b"".join(prompt.id for prompt in asked), revision=1, reason="r", created_at=1.0
    )
    async with kafka.started(kafka.producer) as producer:
        key = regenerate_key(command.command)
        await producer.send_and_wait(kafka.topics.control, Encoder().encode(command), key=key)
    monkeypatch.setattr(ingest_regenerate, "_BATCH", 10)
    (tmp_path / "s.jsonl").touch()
    (tmp_path / "sources.yaml").write_text("sources: [{name: s, files: [s.jsonl], max_new_tokens: 1}]")

    def ingest() -> Ingest:
        settings = IngestSettings(sources_file=str(tmp_path / "sources.yaml"), tokenizer=str(SMOLLM2))
        return Ingest(settings, kafka, sources.load(settings.sources_file))

    async def on_topic() -> list[bytes]:
        return [dict(record.headers)["id"] async for record in kafka.read_all(kafka.topics.prompts)]

    async def begun() -> bool:
        return len(await on_topic()) > 200

    async with running(ingest()):
        await eventually(begun, 60)
    async with running(ingest(), run="r") as (_, task):
        await asyncio.wait_for(task, 60)
    found = await on_topic()
    assert (len(found), len(set(found))) == (400, 400)
    (done,) = {message.done for message in await commands(kafka) if message.done}
    assert (done.prompts, done.missing) == (200, 0)
