"""Ingest from its settings to the idle mark, on a Kafka that is a dictionary and fails when told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError, ProducerFenced

from schemas.control import PROBES_KEY, Control, Dataset, Idle, Probes, SourceTotals
from schemas.dead import DeadLetter
from schemas.prompts import Prompt, SourceRef
from services.ingest import sources
from services.ingest.service import Ingest, make
from services.ingest.settings import IngestSettings
from services.ingest.tokenizer import ChatTokenizer
from services.kernel import control, topics
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal, SettingsError
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context, ProcessSettings
from services.kernel.settings import load
from tests.support.ingest import SMOLLM2, FakeKafka, chat, following


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "s.jsonl").touch()
    sources = tmp_path / "sources.yaml"
    sources.write_text("sources: [{name: s, files: [s.jsonl], max_new_tokens: 1}]")
    return {
        "TOKENHAUL_KAFKA_BOOTSTRAP": "nowhere:1",
        "TOKENHAUL_INGEST_SOURCES_FILE": str(sources),
        "TOKENHAUL_INGEST_TOKENIZER": str(SMOLLM2),
    }


def test_right_settings_make_a_service_and_connect_nowhere(environ: dict[str, str]) -> None:
    make(environ)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TOKENHAUL_INGEST_TOKENIZER", "", "TOKENHAUL_INGEST_TOKENIZER is not set"),
        ("TOKENHAUL_INGEST_TOKENIZER", "/no/where", "TOKENHAUL_INGEST_TOKENIZER='/no/where' is no directory"),
        ("TOKENHAUL_INGEST_SOURCES_FILE", "/no/where", "TOKENHAUL_INGEST_SOURCES_FILE /no/where: cannot be read"),
        (
            "TOKENHAUL_INGEST_BATCH_RECORDS",
            "0",
            "TOKENHAUL_INGEST_BATCH_RECORDS='0' is not allowed: it takes an integer",
        ),
        ("TOKENHAUL_INGEST_STOP_TOKEN_IDS", "1,x", "TOKENHAUL_INGEST_STOP_TOKEN_IDS='1,x' is not allowed"),
        ("TOKENHAUL_INGEST_VOCAB_SIZE", "many", "TOKENHAUL_INGEST_VOCAB_SIZE='many' is not allowed"),
    ],
)
def test_a_wrong_setting_names_its_variable(environ: dict[str, str], variable: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make({**environ, variable: value})
    assert message in str(caught.value)


def test_settings_of_every_kind_are_read(environ: dict[str, str]) -> None:
    given = {"VOCAB_SIZE": "10", "STOP_TOKEN_IDS": "1, 2", "STORE_MESSAGES": "false", "SCAN_SECONDS": "0.5"}
    settings = load(IngestSettings, environ | {f"TOKENHAUL_INGEST_{name}": value for name, value in given.items()})
    assert (settings.vocab_size, settings.context_length, settings.stop_token_ids) == (10, 0, [1, 2])
    assert (settings.store_messages, settings.scan_seconds) == (False, 0.5)


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(kafka: Kafka) -> Dataset:
        return Dataset(name="d", model="the-model", partitions=4, created_at=0.0)

    monkeypatch.setattr(topics, "check", check)
    monkeypatch.setattr(control, "following", following)


def service(environ: dict[str, str], kafka: FakeKafka) -> Ingest:
    settings = load(IngestSettings, {**environ, "TOKENHAUL_INGEST_BATCH_RECORDS": "2", "TOKENHAUL_INGEST_BACKLOG": "0"})
    return Ingest(settings, kafka, sources.load(settings.sources_file))


async def run(environ: dict[str, str], kafka: FakeKafka, *, until_idle: bool = True) -> None:
    context = Context(ProcessSettings(run_id="r"), until_idle=until_idle)
    if not until_idle:
        kafka.on_commit = lambda: context.stopping.set() if kafka.topic("prompts") else None
    await context.run(service(environ, kafka).run(context))


def write(tmp_path: Path, *records: object) -> None:
    with (tmp_path / "s.jsonl").open("a") as out:
        out.writelines(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)


def revise(environ: dict[str, str], asks: str) -> None:
    declared = Path(environ["TOKENHAUL_INGEST_SOURCES_FILE"])
    declared.write_text(f"sources: [{{name: s, files: [s.jsonl], {asks}}}]")


def rows(kafka: FakeKafka) -> list[int]:
    """Of the prompts on all partitions, which have no order among them."""
    return sorted(Decoder(Prompt).decode(record.value).source_ref.row for record in kafka.topic("prompts"))


def mark(kafka: FakeKafka) -> Idle:
    message = Decoder[Control](Control).decode(kafka.topic("control")[-1].value)  # type: ignore[arg-type]
    assert isinstance(message, Idle)
    return message


async def test_all_is_published_or_refused_and_then_the_run_is_idle(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, *(chat(f"Hi {n}") for n in range(5)), {"broken": 1}, chat("Hi 0"), '{"prompt": "no newline"}')
    kafka = FakeKafka()
    await run(environ, kafka)
    assert rows(kafka) == [1, 2, 3, 4, 5, 8]
    (letter,) = (Decoder(DeadLetter).decode(record.value) for record in kafka.topic("dead"))
    assert (letter.source_ref, letter.reason) == (SourceRef("s.jsonl", 6), "unknown_format")
    assert mark(kafka).run == "r"
    assert mark(kafka).sources == {"s": SourceTotals(published=6, repeated=1, refused={"unknown_format": 1})}


async def test_what_is_published_is_not_published_by_the_next_run(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, chat("Hi 1"), chat("Hi 2"))
    kafka = FakeKafka()
    await run(environ, kafka)
    write(tmp_path, chat("Hi 3"))
    await run(environ, kafka)
    assert rows(kafka) == [1, 2, 3]
    assert mark(kafka).sources["s"].published == 3


@pytest.mark.parametrize("answer_lost", [False, True], ids=["not taken", "taken, answer lost"])
async def test_a_failed_commit_neither_loses_nor_repeats(
    environ: dict[str, str], tmp_path: Path, answer_lost: bool
) -> None:
    write(tmp_path, *(chat(f"Hi {n}") for n in range(6)))
    kafka = FakeKafka(None, KafkaTimeoutError(), answer_lost=answer_lost)
    await run(environ, kafka)
    assert rows(kafka) == [1, 2, 3, 4, 5, 6]
    assert mark(kafka).sources["s"] == SourceTotals(published=6)


async def test_a_stop_ends_after_the_transaction_at_hand(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, *(chat(f"Hi {n}") for n in range(6)))
    kafka = FakeKafka()
    await run(environ, kafka, until_idle=False)
    assert kafka.commits == 2  # the probes, and one with the first batch
    assert rows(kafka)[:2] == [1, 2]
    await run(environ, kafka)
    assert rows(kafka) == [1, 2, 3, 4, 5, 6]


async def test_a_successor_ends_it_by_name(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, chat("Hi"))
    with pytest.raises(Fatal, match="another ingest took over"):
        await run(environ, FakeKafka(ProducerFenced()))


async def test_another_request_needs_another_revision(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, chat("Hi"))
    kafka = FakeKafka()
    await run(environ, kafka)
    revise(environ, "max_new_tokens: 2")
    with pytest.raises(Fatal, match="raise its revision to 1 to ask everything anew"):
        await run(environ, kafka)
    revise(environ, "max_new_tokens: 2, revision: 1")
    await run(environ, kafka)
    assert [Decoder(Prompt).decode(record.value).revision for record in kafka.topic("prompts")] == [0, 1]


async def test_a_source_that_was_empty_is_tried_with_its_first_records(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(FakeKafka):
        async def read_all(self, topic: str, isolation: Any = "read_committed") -> AsyncIterator[Any]:
            write(tmp_path, chat("Hi"))  # after the preflight, before the first look at the files
            async for record in super().read_all(topic, isolation):
                yield record

    monkeypatch.setattr(ChatTokenizer, "plain", lambda *_: [1])
    kafka = Late()
    with pytest.raises(Fatal, match=r"s\.jsonl, line 1: encoding the rendered text gives other ids"):
        await run(environ, kafka)
    assert rows(kafka) == []


async def test_generators_are_told_what_an_engines_tokenizer_must_make(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, chat("Hi"))
    kafka = FakeKafka()
    await run(environ, kafka)
    (told,) = [record for record in kafka.topic("control") if record.key == PROBES_KEY]
    message = Decoder[Control](Control).decode(told.value)  # type: ignore[arg-type]
    assert isinstance(message, Probes)
    assert len(message.probes) == 8
    (prompt,) = [Decoder(Prompt).decode(record.value) for record in kafka.topic("prompts")]
    assert message.tokenizer_fingerprint == prompt.tokenizer_fingerprint


async def test_a_source_that_is_not_what_it_should_be_stops_and_the_others_go_on(
    environ: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path, *(chat(f"Hi {n}") for n in range(6)))
    (tmp_path / "bad.jsonl").write_text('{"broken": 1}\n' * 100)
    revise(environ, "max_new_tokens: 1}, {name: bad, files: [bad.jsonl], max_new_tokens: 1, max_bad_in_a_row: 3")
    kafka = FakeKafka()
    await run(environ, kafka)
    assert rows(kafka) == [1, 2, 3, 4, 5, 6]
    stopped = mark(kafka).sources["bad"]
    assert "3 records in a row were refused (max_bad_in_a_row: 3)" in stopped.stopped or "4 records" in stopped.stopped
    assert sum(stopped.refused.values()) < 100
    assert not mark(kafka).sources["s"].stopped


async def test_another_sample_reads_again_for_what_was_left_out(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path, *(chat(f"Hi {n}") for n in range(40)))
    kafka = FakeKafka()
    revise(environ, "max_new_tokens: 1, sample: {fraction: 0.5, seed: 1}")
    await run(environ, kafka)
    first = rows(kafka)
    assert 5 < len(first) < 35
    await run(environ, kafka)
    assert rows(kafka) == first
    revise(environ, "max_new_tokens: 1")
    await run(environ, kafka)
    assert rows(kafka) == list(range(1, 41))
