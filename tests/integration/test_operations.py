"""`tokenhaul status` and `tokenhaul dead` beside a pipeline that runs, on a real Kafka with a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from services import cli
from services.generator import service as generator
from services.ingest import service as ingest
from services.kernel import health, topics
from services.kernel.health import Health
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Service
from services.local.engine.request import Call
from services.local.kafka import free_ports
from services.local.run import LOCAL_TOKENIZER
from services.sink import service as sink
from services.sink.verify import verify
from tests.support.fake_engine import FACTS, BadRequest, FakeEngine, FakeModel, Fault
from tests.support.stream import eventually, running

pytestmark = pytest.mark.long

COUNT = 20
Tool = Callable[..., Awaitable[str]]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FakeModel(FACTS, tokenizer=LOCAL_TOKENIZER)) as engine:
        yield engine


@pytest.fixture
def environ(kafka: Kafka, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a pipeline over 20 prompts and a line that is none."""
    lines = [json.dumps({"prompt": f"Say {number}."}) for number in range(COUNT)]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*lines, '{"messages": 1}']) + "\n")
    (tmp_path / "sources.yaml").write_text("sources: [{name: numbers, files: [prompts.jsonl], max_new_tokens: 24}]")
    settings = {
        "TOKENHAUL_KAFKA_BOOTSTRAP": kafka.address,
        "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
        "TOKENHAUL_INGEST_SOURCES_FILE": str(tmp_path / "sources.yaml"),
        "TOKENHAUL_INGEST_TOKENIZER": str(LOCAL_TOKENIZER),
        "TOKENHAUL_INGEST_SCAN_SECONDS": "0.2",
        "TOKENHAUL_GENERATOR_ENGINES": engine.url,
        "TOKENHAUL_SINK_ROOT": str(tmp_path / "out"),
        "TOKENHAUL_SINK_MAX_AGE_SECONDS": "0.2",
        "TOKENHAUL_STATUS_METRICS": ",".join(f"127.0.0.1:{port}" for port in free_ports(3)),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture
def tool(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Tool:
    """What `tokenhaul ...` prints."""

    async def run(*arguments: str) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(cli.main, arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
async def pipeline(kafka: Kafka, environ: dict[str, str]) -> AsyncIterator[None]:
    """The three services, with their metrics where TOKENHAUL_STATUS_METRICS says."""
    await topics.create(kafka, topics.new_dataset("test", "fake", 3), replication=1, min_isr=1)
    ports = [int(address.rpartition(":")[2]) for address in environ["TOKENHAUL_STATUS_METRICS"].split(",")]
    services: list[Service] = [room.make(environ) for room in (ingest, generator, sink)]
    async with AsyncExitStack() as stack:
        for service, port in zip(services, ports, strict=True):
            runner = await health.serve(Health(), service.metrics.registry, "127.0.0.1", port)
            stack.push_async_callback(runner.cleanup)
            await stack.enter_async_context(running(service))
        yield


async def dead(tool: Tool) -> dict[str, int]:
    """{reason: letters}, as `tokenhaul dead list` counts them."""
    return {row["reason"]: row["letters"] for row in json.loads(await tool("dead", "list", "--json"))}


async def test_what_failed_is_asked_again_once_and_its_rows_supersede_the_failures(
    kafka: Kafka, engine: FakeEngine, tool: Tool, pipeline: None, tmp_path: Path
) -> None:
    broken, stubborn = True, [0]

    def refuse(call: Call) -> Fault | None:
        return BadRequest() if broken or call.generations[0].prompt_ids == stubborn else None

    engine.script(refuse)

    async def dead_is(**reasons: int) -> bool:
        return await dead(tool) == reasons

    await eventually(partial(dead_is, engine_rejected=COUNT, bad_field=1), 120)
    (shown,) = json.loads(await tool("dead", "show", "--reason", "engine_rejected", "--limit", "1", "--json"))
    assert (shown["stage"], shown["source"]) == ("generator", "numbers")
    assert shown["place"].startswith("prompts.jsonl:")
    assert "a scripted refusal" in shown["detail"]
    assert "no prompt to ask again" in await tool("dead", "replay", "--reason", "bad_field", "--yes")
    assert f"{COUNT} prompts would be asked again" in await tool("dead", "replay")
    assert len(engine.started) == COUNT, "a dry run asks nothing"

    broken, stubborn = False, engine.started[0].input_ids
    assert f"{COUNT} prompts are asked again" in await tool("dead", "replay", "--yes")
    await eventually(partial(dead_is, engine_rejected=1, bad_field=1), 120)
    assert "1 letters are dropped" in await tool("dead", "drop", "--reason", "bad_field", "--yes")
    assert await dead(tool) == {"engine_rejected": 1}

    async def all_committed() -> bool:
        status = json.loads(await tool("status", "--json"))
        return bool(status["rows"] == COUNT - 1 and status["waiting_outcomes"] == 0)

    await eventually(all_committed, 120)
    report = await asyncio.to_thread(verify, tmp_path / "out", LOCAL_TOKENIZER, kafka=kafka)
    assert report.ok, report.text()
    assert (report.rows, report.failures, report.superseded) == (COUNT - 1, {"engine_rejected": 1}, COUNT - 1)
    assert report.accounts
    assert (report.accounts.rows, report.accounts.failures, report.accounts.replayed) == (COUNT - 1, 1, COUNT)
    assert set(Counter(tuple(started.input_ids) for started in engine.started).values()) == {2}, "asked again once each"


async def test_status_tells_how_far_it_is(tool: Tool, pipeline: None, tmp_path: Path) -> None:
    async def done() -> bool:
        return bool(json.loads(await tool("status", "--json"))["rows"] == COUNT)

    await eventually(done, 120)
    status = json.loads(await tool("status", "--json"))
    source = status["sources"]["numbers"]
    assert (source["published"], source["done"], source["share"]) == (COUNT, COUNT, 1.0)
    assert (source["dead"], source["failed"], source["refused"]) == (1, 0, 1), "what is refused has not failed"
    (seen,) = status["engines"].values()
    assert (seen["ready"], seen["in_flight"]) == (True, 0)
    assert seen["window"] > 0
    assert seen["tokens_per_second"] is not None
    assert (status["waiting_prompts"], status["waiting_outcomes"], status["discarded"]) == (0, 0, 0)
    assert sum(each["tail"] for each in status["partitions"].values()) == COUNT
    assert status["unreachable"] == {}
    shown = await tool("status")
    assert "numbers" in shown
    assert "100.0%" in shown
    told_by_sinks = json.loads(await tool("status", "--json", "--root", ""))
    assert told_by_sinks["sources"]["numbers"]["done"] == COUNT
    assert told_by_sinks["rows"] is None
    store_away = json.loads(await tool("status", "--json", "--root", str(tmp_path / "away")))
    assert store_away["sources"]["numbers"]["done"] == COUNT, "the sinks know"
    assert "away is no dataset" in store_away["shards_unread"]
