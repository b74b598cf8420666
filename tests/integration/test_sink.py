"""Sinks as processes on a real Kafka, over files and over S3."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from services.kernel.kafka import Kafka
from services.local.kafka import free_ports
from services.sink.report import Report
from services.sink.verify import NothingToVerify, verify
from tests.support.outcomes import make_failure, make_sequence
from tests.support.processes import tokenhaul
from tests.support.s3 import S3Server
from tests.support.stream import create_topics, eventually, publish_outcomes


class SinkProcess:
    """`tokenhaul sink`, and what its /metrics say."""

    def __init__(self, kafka: Kafka, root: str, **settings: object) -> None:
        (self._port,) = free_ports(1)
        environ = {f"TOKENHAUL_SINK_{name.upper()}": str(value) for name, value in settings.items()}
        self.process: subprocess.Popen[str] = tokenhaul(
            "sink",
            TOKENHAUL_KAFKA_BOOTSTRAP=kafka.address,
            TOKENHAUL_KAFKA_PREFIX=kafka.settings.prefix,
            TOKENHAUL_KAFKA_SESSION_TIMEOUT_SECONDS="6",
            TOKENHAUL_METRICS_PORT=str(self._port),
            TOKENHAUL_SINK_ROOT=root,
            **environ,
        )

    def metric(self, name: str) -> float:
        """The sum over all labels; 0 as long as nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        return sum(map(float, re.findall(rf"^tokenhaul_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))

    async def reaches(self, name: str, least: float) -> None:
        """Return when the metric is that large."""

        async def reached() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return await asyncio.to_thread(self.metric, name) >= least

        await eventually(reached, 120)

    async def end(self) -> str:
        """SIGTERM; what it has printed."""
        self.process.terminate()
        printed, _ = await asyncio.to_thread(self.process.communicate, timeout=90)
        assert self.process.returncode == 0, printed
        return printed


def report_of(root: str) -> Report | None:
    try:
        return verify(root)
    except NothingToVerify:
        return None


async def rows_in(root: str, count: int) -> None:
    """Return when the dataset has so many."""

    async def there() -> bool:
        report = await asyncio.to_thread(report_of, root)
        return report is not None and report.rows >= count

    await eventually(there, 120)


@pytest.mark.parametrize("kind", ["files", "s3"])
@pytest.mark.long
async def test_a_sink_that_was_thought_dead(kind: str, kafka: Kafka, tmp_path: Path, s3: S3Server) -> None:
    """It freezes with open shards, another one takes its partitions and commits them, it wakes up and commits too."""
    root = str(tmp_path) if kind == "files" else s3.fresh_root()
    await create_topics(kafka)
    await publish_outcomes(kafka, [make_sequence(number) for number in range(150)] + [make_failure(150)])
    zombie = SinkProcess(kafka, root, max_age_seconds=20)
    await zombie.reaches("sink_buffer_rows", 150)
    os.kill(zombie.process.pid, signal.SIGSTOP)

    heir = SinkProcess(kafka, root, max_age_seconds=0.5)
    await rows_in(root, 150)
    # Some again, some new: what the zombie holds has become history by now.
    await publish_outcomes(kafka, [make_sequence(number) for number in range(100, 200)])
    await rows_in(root, 200 - 1)
    os.kill(zombie.process.pid, signal.SIGCONT)
    # Partitions move once more, so it is not known who writes these.
    await publish_outcomes(kafka, [make_sequence(number) for number in range(200, 260)])
    await rows_in(root, 260)
    await zombie.reaches("sink_commit_conflicts_total", 1)
    said = await zombie.end()
    await heir.end()

    report = verify(root)
    assert report.problems == []
    # 150 failed first and was answered later: its row stands in the failure's place.
    assert (report.rows, report.failures, report.superseded, report.duplicates) == (260, {}, 1, 50)
    assert "another writer committed this part" in said


async def test_two_sinks_share_the_work_and_one_is_killed(kafka: Kafka, tmp_path: Path) -> None:
    root = str(tmp_path)
    await create_topics(kafka)
    sinks = [SinkProcess(kafka, root, max_age_seconds=1) for _ in range(2)]
    for start in range(0, 300, 100):
        await publish_outcomes(kafka, [make_sequence(number) for number in range(start, start + 100)])
        await rows_in(root, start + 100)
        if start == 100:
            sinks.pop().process.kill()
    await sinks[0].end()
    report = verify(root)
    assert report.problems == []
    assert (report.rows, report.duplicates) == (300, 0)
