"""A sink whose disk says no, before the effect, between, and after it: every outcome lands once, none is lost."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.kernel import failpoints
from services.kernel.kafka import Kafka
from services.sink import service
from services.sink.service import Sink
from services.sink.verify import verify
from tests.support.outcomes import make_sequence
from tests.support.stream import create_topics, eventually, publish_outcomes, running

COUNT = 60


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm([])


def make_sink(kafka: Kafka, root: Path) -> Sink:
    return service.make(
        {
            "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
            "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
            "TOKENHAUL_SINK_ROOT": str(root),
            "TOKENHAUL_SINK_MAX_ROWS": "10",
            "TOKENHAUL_SINK_MAX_AGE_SECONDS": "0.5",
        }
    )


def rows_in(root: Path) -> int:
    return verify(root).rows if any(root.rglob("*.parquet")) else 0


async def all_land(kafka: Kafka, root: Path, fault: Callable[[], None]) -> Sink:
    """A sink that meets `fault` while outcomes come in; returns it when all are rows, each once."""
    await create_topics(kafka)
    sink = make_sink(kafka, root)
    async with running(sink) as (context, task):
        await eventually(lambda: not context.health.not_ready)
        fault()
        await publish_outcomes(kafka, [make_sequence(number) for number in range(COUNT)])

        async def rows() -> bool:
            assert not task.done(), task.result()
            return await asyncio.to_thread(rows_in, root) >= COUNT

        await eventually(rows, 60)
    report = verify(root)
    assert (report.ok, report.rows, report.failures) == (True, COUNT, {}), report.text()
    assert not any((root / ".tmp").iterdir()), "something unfinished was left"
    return sink


@pytest.mark.parametrize("place", ["create.before", "create.written", "create.linked", "create.after"])
async def test_an_error_at_every_stage_of_a_commit(place: str, kafka: Kafka, tmp_path: Path) -> None:
    sink = await all_land(kafka, tmp_path, lambda: failpoints.arm([f"{place}=error@2"]))
    assert sink.metrics._retries.labels("sink", "store")._value.get() >= 1, "the fault was not met"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
async def test_a_disk_that_is_full_or_read_only_or_closed_for_a_while(
    number: int, kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, left = os.fsync, [3]

    def refuse(descriptor: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    sink = await all_land(kafka, tmp_path, lambda: monkeypatch.setattr(os, "fsync", refuse))
    assert left == [0]
    assert sink.metrics._retries.labels("sink", "store")._value.get() >= 1


async def test_an_unfinished_file_of_a_writer_that_died_is_in_nobody_s_way(kafka: Kafka, tmp_path: Path) -> None:
    """What a kill between write and link leaves behind: torn bytes under a temporary name."""
    stale = tmp_path / ".tmp" / "0123"
    stale.parent.mkdir()
    stale.write_bytes(b"PAR1 torn")
    os.utime(stale, (0, 0))
    await all_land(kafka, tmp_path, lambda: None)
    assert not stale.exists()
