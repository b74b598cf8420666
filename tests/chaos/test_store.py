"""A sink whose disk says no, before the effect, between, and after it: every outcome lands once, none is lost."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.kernel import failpoints
from services.kernel.kafka import Kafka
from services.sink import service
from services.sink.service import Sink
from services.sink.verify import NothingToVerify, verify
from tests.support.faulty_s3 import Fault, FaultyS3
from tests.support.outcomes import make_sequence
from tests.support.s3 import S3Server
from tests.support.stream import create_topics, eventually, publish_outcomes, running

COUNT = 60


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm([])


def make_sink(kafka: Kafka, root: Path | str, **settings: str) -> Sink:
    return service.make(
        {
            "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
            "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
            "TOKENHAUL_SINK_ROOT": str(root),
            "TOKENHAUL_SINK_MAX_ROWS": "10",
            "TOKENHAUL_SINK_MAX_AGE_SECONDS": "0.5",
        }
        | {f"TOKENHAUL_SINK_{name.upper()}": value for name, value in settings.items()}
    )


def rows_in(root: Path | str) -> int:
    try:
        return verify(root).rows
    except NothingToVerify:
        return 0


async def all_land(kafka: Kafka, root: Path | str, fault: Callable[[], None]) -> Sink:
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
    if isinstance(root, Path):
        assert not any((root / ".tmp").iterdir()), "something unfinished was left"
    return sink


@pytest.mark.parametrize("place", ["create.before", "create.written", "create.linked", "create.after"])
async def test_an_error_at_every_stage_of_a_commit(place: str, kafka: Kafka, tmp_path: Path) -> None:
    sink = await all_land(kafka, tmp_path, lambda: failpoints.arm([f"{place}=error@2"]))
    assert sink.metrics._retries.labels("sink", "store")._value.get() >= 1, "the fault was not met"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["fsync", "link"])
async def test_a_disk_that_is_full_or_read_only_or_closed_for_a_while(
    call: str, number: int, kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, left = getattr(os, call), [3]

    def refuse(*arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        really(*arguments)

    sink = await all_land(kafka, tmp_path, lambda: monkeypatch.setattr(os, call, refuse))
    assert left == [0]
    assert sink.metrics._retries.labels("sink", "store")._value.get() >= 1


@pytest.mark.parametrize("fault", ["429", "500", "503", "409", "reset", "500 after", "reset after"])
async def test_an_object_store_that_fails_for_a_while(
    fault: Fault, kafka: Kafka, s3: S3Server, proxy: FaultyS3
) -> None:
    await all_land(kafka, s3.fresh_root(), lambda: proxy.fail(fault, 3))
    assert proxy.met == 3


async def test_an_object_store_whose_answer_nobody_sees(kafka: Kafka, s3: S3Server) -> None:
    await all_land(kafka, s3.fresh_root(), lambda: failpoints.arm(["create.put=error@2"]))
    assert failpoints._passed["create.put"] > 2, "the fault was not met"


async def test_an_unfinished_file_of_a_writer_that_died_is_in_nobody_s_way(kafka: Kafka, tmp_path: Path) -> None:
    """What a kill between write and link leaves behind: torn bytes under a temporary name."""
    stale = tmp_path / ".tmp" / "0123"
    stale.parent.mkdir()
    stale.write_bytes(b"PAR1 torn")
    os.utime(stale, (0, 0))
    await all_land(kafka, tmp_path, lambda: None)
    assert not stale.exists()
