"""The service around the writer: what it needs before it begins, its loop, its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError

from schemas.control import HALT_KEY, Halt, Idle, Spent, idle_key, spent_key
from services.kernel import lifecycle
from services.kernel.control import ControlView
from services.kernel.errors import Retry
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import Context, ProcessSettings
from services.local.kafka import free_ports
from services.sink import idle
from services.sink.chain import find
from services.sink.deadletters import DeadLetters
from services.sink.idle import Upstream
from services.sink.metrics import SinkMetrics
from services.sink.opening import claimed
from services.sink.service import Sink, make
from services.sink.settings import SinkSettings
from services.sink.verify import verify
from tests.support.fake_consumer import FakeConsumer
from tests.support.outcomes import DATASET
from tests.support.sink_bench import ROWS, Bench, Store
from tests.support.stream import eventually

KAFKA = Kafka(KafkaSettings(bootstrap=["127.0.0.1:1"], prefix="test"))
ENVIRON = {"TOKENHAUL_KAFKA_BOOTSTRAP": "127.0.0.1:1"}


def test_a_root_that_cannot_hold_shards_is_a_wrong_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "file"
    root.touch()
    environ = {**ENVIRON, "TOKENHAUL_SINK_ROOT": str(root), "TOKENHAUL_METRICS_PORT": str(free_ports(1)[0])}
    assert lifecycle.run(make, environ, until_idle=False) == 2
    assert f"TOKENHAUL_SINK_ROOT='{root}' is not usable" in capsys.readouterr().err


def test_all_wrong_settings_are_named_before_anything_connects(capsys: pytest.CaptureFixture[str]) -> None:
    assert lifecycle.run(make, {**ENVIRON, "TOKENHAUL_SINK_MAX_ROWS": "x"}, until_idle=False) == 2
    assert "TOKENHAUL_SINK_ROOT is not set" in (printed := capsys.readouterr().err)
    assert "TOKENHAUL_SINK_MAX_ROWS='x' is not allowed" in printed


def test_making_a_sink_neither_writes_nor_connects(tmp_path: Path) -> None:
    make({**ENVIRON, "TOKENHAUL_SINK_ROOT": str(tmp_path / "new")})
    assert os.listdir(tmp_path) == []


async def test_a_store_that_hesitates_at_the_start_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.kernel.retry.Backoff.next", lambda self: 0.0)
    store, failures = Store(tmp_path), iter(range(2))

    def before() -> None:
        for _ in failures:
            raise Retry("store", "no answer")

    store.before = before
    metrics = SinkMetrics()
    await claimed(store, DATASET, metrics)
    assert find(store) == ("test", DATASET)
    assert metrics.registry.get_sample_value("tokenhaul_retries_total", {"stage": "sink", "cause": "store"}) == 2


class Running:
    """The service's loop over a bench."""

    def __init__(self, bench: Bench, upstream: Any = None) -> None:
        self.sink = Sink(SinkSettings(root=str(bench.root)), KAFKA)
        self.context = Context(ProcessSettings(), until_idle=upstream is not None)
        self.bench, self._upstream = bench, upstream

    async def __call__(self) -> None:
        await self.sink._loop(self.context, self.bench.writer, self._upstream)
        await self.sink._drain(self.context, self.bench.writer)


class Flag:
    """An upstream that is idle when it is told so."""

    def __init__(self, *, is_idle: bool = False) -> None:
        self.is_idle = is_idle

    async def idle(self) -> bool:
        return self.is_idle


async def test_a_stop_commits_what_is_open(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.consumer.append(0, *ROWS)
    await bench.assign(0)
    running = Running(bench)
    task = asyncio.create_task(running())
    await eventually(lambda: bench.metric("sink_buffer_rows") == len(ROWS))
    assert running.context.health.not_ready == ""
    running.context.stopping.set()
    await task
    assert bench.shards() == [(0, len(ROWS))]


async def test_until_idle_ends_when_upstream_is_and_all_is_committed(tmp_path: Path) -> None:
    bench, upstream = Bench(tmp_path), Flag()
    bench.consumer.append(0, *ROWS[:5])
    await bench.assign(0, 1)
    task = asyncio.create_task(Running(bench, upstream)())
    await eventually(lambda: bench.metric("sink_buffer_rows") == 5)
    assert not task.done()
    bench.consumer.append(0, *ROWS[5:])
    bench.consumer.append(1, b"unreadable")
    upstream.is_idle = True
    await task
    assert (sum(rows for _, rows in bench.shards(0)), bench.shards(1)) == (len(ROWS), [(0, 0)])


async def test_records_deleted_under_our_hands_cost_no_more_than_themselves(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_gap="continue")
    bench.consumer.append(0, *ROWS[:4])
    await bench.assign(0)
    await bench.read()
    bench.consumer.append(0, *ROWS[4:])
    bench.consumer.begins[0] = 8
    await Running(bench, Flag(is_idle=True))()
    report = verify(tmp_path)
    assert report.ok
    assert (report.rows, report.gap) == (len(ROWS) - 4, 4)


async def test_upstream_is_idle_after_the_mark_and_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool | Exception] = [KafkaTimeoutError(), False, True]
    asked: list[str] = []

    async def caught_up(admin: object, consumer: object, group: str, topic: str) -> bool:
        asked.append(f"{group} {topic}")
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(idle, "caught_up", caught_up)
    monkeypatch.setattr(idle, "_ASK_SECONDS", 0.0)
    view = ControlView()
    upstream = Upstream(KAFKA, view, None, FakeConsumer(), "run")
    view.update(idle_key("other"), Idle(run="other", sources={}, created_at=0.0))
    assert not await upstream.idle()
    assert asked == []
    view.update(idle_key("run"), Idle(run="run", sources={}, created_at=0.0))
    assert [await upstream.idle() for _ in range(4)] == [False, False, True, True]
    assert asked == ["test.generator test.prompts"] * 3


async def test_upstream_is_idle_when_a_budget_has_halted_all_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    anybody = True

    async def has_members(admin: object, group: str) -> bool:
        assert group == "test.generator"
        return anybody

    monkeypatch.setattr(idle, "has_members", has_members)
    monkeypatch.setattr(idle, "_ASK_SECONDS", 0.0)
    view = ControlView()

    def spent(member: str, *, stopped: bool, epoch: int = 1) -> None:
        made = Spent(member=member, epoch=epoch, rows=1, output_tokens=1, since=0.0, stopped=stopped)
        view.update(spent_key(member), made)

    spent("of another epoch", stopped=False, epoch=0)
    spent("a", stopped=True)
    spent("b", stopped=False)
    assert not await Upstream(KAFKA, view, None, FakeConsumer(), "run").idle()
    view.update(HALT_KEY, Halt(halted=True, epoch=1, created_at=0.0))
    assert not await Upstream(KAFKA, view, None, FakeConsumer(), "run").idle(), "b has prompts in flight"
    anybody = False
    assert await Upstream(KAFKA, view, None, FakeConsumer(), "run").idle(), "b was killed"
    anybody = True
    spent("b", stopped=True)
    assert await Upstream(KAFKA, view, None, FakeConsumer(), "run").idle()


class Producer:
    """Takes what is sent, unless `error` is set."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []
        self.stopped = False
        self.error: Exception | None = None

    async def start(self) -> None:
        """Nothing to connect to."""

    async def stop(self) -> None:
        self.stopped = True
        if self.error:
            raise self.error  # to end is no easier for it than to send

    async def send(
        self, topic: str, value: bytes, key: bytes, headers: list[tuple[str, bytes]]
    ) -> asyncio.Future[None]:
        assert (topic, dict(headers)) == ("test.dead", {"schema": b"dead.v1", "id": key})
        future = asyncio.get_running_loop().create_future()
        if self.error:
            future.set_exception(self.error)
        else:
            future.set_result(None)
            self.sent.append((key, value))
        return future


async def test_a_producer_that_failed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = [Producer(), Producer()]
    producers[0].error = KafkaTimeoutError()
    waiting = iter(producers)
    monkeypatch.setattr(KAFKA, "producer", lambda: next(waiting))
    letters = DeadLetters(KAFKA)
    with pytest.raises(Retry, match=r"test\.dead at 127\.0\.0\.1:1"):
        await letters.publish([(b"1", b"a"), (b"2", b"b")])
    assert producers[0].stopped
    await letters.publish([(b"1", b"a"), (b"2", b"b")])
    await letters.publish([(b"3", b"c")])
    assert producers[1].sent == [(b"1", b"a"), (b"2", b"b"), (b"3", b"c")]
    await letters.close()
    assert producers[1].stopped


async def test_without_letters_nothing_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KAFKA, "producer", lambda: pytest.fail("a producer was made"))
    letters = DeadLetters(KAFKA)
    await letters.publish([])
    await letters.close()
