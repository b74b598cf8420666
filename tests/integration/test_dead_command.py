"""`tokenhaul dead` beside shards: a failure that is a row by now is neither shown nor paid for again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from schemas.control import Control, Replay
from schemas.dead import DeadLetter
from schemas.sequences import Failure
from services.cli import main
from services.kernel.codec import Decoder, Encoder
from services.kernel.kafka import Kafka
from services.kernel.store import LocalStore
from services.sink.chain import claim
from tests.support.datasets import append
from tests.support.outcomes import DATASET, make_failure, make_sequence
from tests.support.stream import create_topics


async def write_letters(kafka: Kafka, failures: list[Failure]) -> None:
    async with kafka.started(kafka.producer) as producer:
        for failure in failures:
            letter = DeadLetter(
                stage="generator", reason=failure.reason.value, detail="no", id=failure.record_id,
                prompt=failure.prompt, created_at=failure.failed_at,
            )  # fmt: skip
            await producer.send_and_wait(kafka.topics.dead, Encoder().encode(letter), key=failure.record_id)


async def replayed(kafka: Kafka) -> list[bytes]:
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    found = [decoder.decode(record.value) async for record in kafka.read_all(kafka.topics.control)]
    ids = b"".join(message.ids for message in found if isinstance(message, Replay))
    return sorted(ids[at : at + 16] for at in range(0, len(ids), 16))


async def test_what_is_a_row_by_now_is_not_asked_again(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await create_topics(kafka)
    monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", kafka.address)
    monkeypatch.setenv("TOKENHAUL_KAFKA_PREFIX", kafka.settings.prefix)
    monkeypatch.delenv("TOKENHAUL_SINK_ROOT", raising=False)
    failures = [make_failure(number) for number in range(6)]
    await write_letters(kafka, failures)
    append(tmp_path / "out", failures)
    append(tmp_path / "out", [make_sequence(number) for number in (1, 4, 9)])
    other = msgspec.structs.replace(DATASET, name="other")
    claim(LocalStore(tmp_path / "other"), other)
    root = ["--root", str(tmp_path / "out")]

    async def dead(*words: str, status: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["dead", *words]) == status
        output = capsys.readouterr()
        return output.out, output.err

    async def listed(*words: str) -> tuple[int, str]:
        out, err = await dead("list", "--json", *words)
        return sum(row["letters"] for row in json.loads(out)), err

    assert (await listed())[0] == 6, "without the shards nobody knows"
    assert await listed(*root) == (4, "2 letters are left out: their records are rows by now\n")
    count, error = await listed("--root", str(tmp_path / "other"))
    assert count == 6
    assert "not known whether some of them are rows" in error
    shown = json.loads((await dead("show", "--json", *root))[0])
    assert failures[1].record_id.hex() not in {letter["id"] for letter in shown}

    assert "belong to" in (await dead("replay", "--yes", "--root", str(tmp_path / "other"), status=2))[1]
    assert "not known without --root" in (await dead("replay"))[1]
    assert await replayed(kafka) == []
    assert "4 prompts are asked again" in (await dead("replay", "--yes", *root))[0]
    assert await replayed(kafka) == sorted(failures[number].record_id for number in (0, 2, 3, 5))
