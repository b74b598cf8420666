"""The judge of the chaos runs must see what is wrong: one planted fault for every promise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from services.kernel.kafka import Kafka
from services.kernel.watermark import Tracker
from tests.chaos import evidence
from tests.chaos.checker import judge
from tests.chaos.facts import Commit, Event, Evidence, Generation, Prompt, Shard
from tests.chaos.load import Memory
from tests.chaos.run import never_struck
from tests.chaos.schedule import Fault, schedule
from tests.chaos.wire import read_topics
from tests.support.stream import create_topics, make_prompt, publish


def generation(number: int, started: float = 0.0, attempt: str = "", **changes: Any) -> Generation:
    made = Generation(
        rid=f"rid{number}{attempt}", input_ids=(1, number), output_ids=(7, 2), started=started + number,
        ended=started + number + 0.5, fault=None, aborted=False,
    )  # fmt: skip
    return made._replace(**changes)


def row(number: int) -> dict[str, Any]:
    ids = [1, number, 7, 2]
    return {"id": f"id{number}", "input_ids": ids, "prompt_length": 2, "rids": [f"rid{number}"], "kafka_offset": number}


@pytest.fixture
def good() -> Evidence:
    """Five prompts, five rows in two shards; each generated and committed in time."""
    numbers = range(5)
    return Evidence(
        lines=[f"line {number}" for number in numbers],
        prompts=[Prompt(f"id{number}", (1, number), 0, number, f"line {number}") for number in numbers],
        shards=[
            Shard("partition=00000/00000000000000000000.parquet", 0, 0, 3, [row(0), row(1), row(2)], [], []),
            Shard("partition=00000/00000000000000000003.parquet", 0, 3, 5, [row(3), row(4)], [], []),
        ],
        damaged=[],
        generations=[generation(number) for number in numbers],
        torn=0,
        commits=[Commit(number + 1.0, 0, number + 1, number + 1, frozenset()) for number in numbers],
        events=[],
    )


def repeated(evidence: Evidence, again: float, *events: Event, **before: Any) -> Evidence:
    """Prompt 0 is generated once more at `again`; `before` changes what became of the first time."""
    first = generation(0, **before)
    second = generation(0, started=again, attempt="b")
    rows = [row(0) | {"rids": ["rid0", "rid0b"]}, row(1), row(2)]
    return evidence._replace(
        generations=sorted([first, second, *evidence.generations[1:]], key=lambda made: made.started),
        events=list(events),
        shards=[evidence.shards[0]._replace(rows=rows), evidence.shards[1]],
    )


def test_nothing_is_wrong_with_what_is_right(good: Evidence) -> None:
    verdict = judge(good)
    assert verdict.problems == []
    assert (verdict.counts["rows"], verdict.counts["failures"], verdict.counts["generations"]) == (5, 0, 5)


PLANTED: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "a line lost by ingest": (lambda e: e._replace(lines=[*e.lines, "line 6"]), "'line 6' became 0 prompts"),
    "a line published twice": (
        lambda e: e._replace(prompts=[*e.prompts, Prompt("id6", (1, 6), 0, 6, "line 0")]), "'line 0' became 2 prompts",
    ),
    "a record id twice on the topic": (
        lambda e: e._replace(prompts=[*e.prompts, e.prompts[0]]), "id0 stands 2 times on the prompts topic",
    ),
    "a lost row": (
        lambda e: e._replace(shards=[e.shards[0]._replace(rows=e.shards[0].rows[:2]), e.shards[1]]), "id2 was lost",
    ),
    "a prompt given up": (
        lambda e: e._replace(shards=[e.shards[0], e.shards[1]._replace(rows=[row(3)], failures=[("id4", "nan")])]),
        "id4 was given up: nan",
    ),
    "a row twice": (
        lambda e: e._replace(shards=[e.shards[0], e.shards[1]._replace(rows=[row(0) | {"kafka_offset": 4}])]),
        "id0 is in 2 rows",
    ),
    "a row nobody asked for": (
        lambda e: e._replace(prompts=e.prompts[1:], lines=e.lines[1:]), "id0 is in the dataset, but was never asked",
    ),
    "a failure beside its row": (
        lambda e: e._replace(shards=[e.shards[0], e.shards[1]._replace(failures=[("id0", "nan")])]),
        "id0 is a row and a failure, but not marked superseded",
    ),
    "a hole in a chain": (
        lambda e: e._replace(shards=[e.shards[0]._replace(end=2), e.shards[1]]), "begins at 3, the one before it ends",
    ),
    "an overlap of two writers": (
        lambda e: e._replace(shards=[e.shards[0]._replace(end=5), e.shards[1]]), "begins at 3, the one before it ends",
    ),
    "a torn shard": (lambda e: e._replace(damaged=["x.parquet: ArrowInvalid()"]), "not readable: x.parquet"),
    "an id changed on its way": (
        lambda e: e._replace(
            shards=[e.shards[0]._replace(rows=[row(0) | {"input_ids": [1, 0, 7, 3]}, row(1), row(2)]), e.shards[1]]
        ),
        "id0: its ids are not what the engine logged for rid0",
    ),
    "a row of another prompt": (
        lambda e: e._replace(prompts=[e.prompts[0]._replace(prompt_ids=(9, 9)), *e.prompts[1:]]),
        "id0: it does not begin with the ids of its prompt",
    ),
    "a row no engine made": (
        lambda e: e._replace(generations=e.generations[1:]), "id0: no engine has logged an end of its request rid0",
    ),
    "a generation of no prompt": (
        lambda e: e._replace(generations=[*e.generations, generation(77)]), "asked for ids that are no prompt",
    ),
    "paid for again although committed": (
        lambda e: repeated(e, 30.0, Event("kill", "generate-0", 29.0, 29.0)), "id0 was paid for again without a reason",
    ),
    "paid for again although nothing happened": (
        lambda e: repeated(e, 0.8), "id0 was paid for again without a reason",
    ),
    "paid for again after a slow answer that was committed": (
        lambda e: repeated(e, 30.0, Event("kill", "generate-0", 29.0, 29.0), fault="Latency"),
        "id0 was paid for again without a reason",
    ),
    "asked twice at once under one name": (
        lambda e: e._replace(generations=[*e.generations, e.generations[4]]), "engines were asked 2 times as rid4",
    ),
    "a log that cannot be read": (lambda e: e._replace(torn=1), "1 lines of engines' logs are not readable"),
    "more than faults explain": (
        lambda e: e._replace(generations=[generation(0, 0.01 * n, f"-{n}", fault=None) for n in range(40)]),
        "more than the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_it_sees(planted: str, good: Evidence) -> None:
    plant, told = PLANTED[planted]
    assert any(told in problem for problem in judge(plant(good)).problems), judge(plant(good)).problems


@pytest.mark.parametrize(
    ("again", "events", "before", "excuse"),
    [
        (0.8, [Event("kill", "generate-0", 0.7, 0.7)], {}, "it was not committed"),
        (30.0, [Event("kill", "engine-0", 29.0, 29.0)], {"ended": None, "output_ids": ()}, "it was in flight"),
        (30.0, [], {"fault": "Reset"}, "a fault was asked for"),
        (30.0, [Event("freeze", "generate-0", 0.7, 29.0)], {}, "somebody was frozen"),
    ],
)
def test_it_accepts_what_had_to_be_done_again(
    good: Evidence, again: float, events: list[Event], before: dict[str, Any], excuse: str
) -> None:
    verdict = judge(repeated(good, again, *events, **before))
    assert verdict.problems == []
    assert verdict.counts[f"repeated, {excuse}"] == 1


def test_a_torn_shard_is_found_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "partition=00000"
    folder.mkdir()
    footer = {"partition": 0, "start": 0, "end": 1, "failures": [], "superseded": []}
    table = pa.Table.from_pylist([row(0)]).replace_schema_metadata({"tokenhaul": json.dumps(footer)})
    pq.write_table(table, folder / f"{0:020d}.parquet")
    shards, damaged = evidence.read_shards(tmp_path)
    assert (len(shards), damaged) == (1, [])
    whole = (folder / f"{0:020d}.parquet").read_bytes()
    (folder / f"{1:020d}.parquet").write_bytes(whole[:-20])
    shards, damaged = evidence.read_shards(tmp_path)
    assert (len(shards), len(damaged)) == (1, 1)


def test_a_request_that_came_twice_is_two_generations(tmp_path: Path) -> None:
    log = tmp_path / "engine.jsonl"
    start = {"at": 1.0, "type": "Started", "rid": "a", "input_ids": [1], "fault": None}
    end = {"at": 2.0, "type": "Ended", "rid": "a", "output_ids": [7, 2], "finish_reason": {"type": "stop"}}
    log.write_text("\n".join(["", json.dumps(start), json.dumps(end), '{"at": 3.', "", json.dumps(start)]))
    made, torn = evidence.read_generations([log])
    assert [(each.rid, each.ended, each.output_ids) for each in made] == [("a", 2.0, (7, 2)), ("a", None, ())]
    assert torn == 1


async def test_it_reads_prompts_and_commits_off_a_real_kafka(kafka: Kafka) -> None:
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(30)]
    await publish(kafka, prompts)
    tracker = Tracker(0)
    tracker.take(range(12))
    for done in (0, 1, 4, 5, 9):
        tracker.done(done)
    async with kafka.started(lambda: kafka.consumer(kafka.topics.generator_group, "read_committed")) as consumer:
        partition = TopicPartition(kafka.topics.prompts, 1)
        consumer.assign([partition])
        await consumer.commit({partition: OffsetAndMetadata(tracker.watermark, tracker.metadata())})
    found, commits, _ = await read_topics(kafka.settings.bootstrap, kafka.settings.prefix)
    assert {(prompt.id, prompt.prompt_ids) for prompt in found} == {(p.id.hex(), tuple(p.prompt_ids)) for p in prompts}
    (commit,) = commits
    assert commit.partition == 1
    assert [offset for offset in range(14) if commit.covers(offset)] == [0, 1, 4, 5, 9]


def test_a_place_where_nobody_ever_dies_is_told() -> None:
    faults = [Fault(0.0, "failpoint", f"sink-{number % 2}", detail="commit.after=kill@1") for number in range(5)]
    assert never_struck(faults, Counter({"generate commit.after": 3})) == [
        "sink was to die at a place 5 times and never did"
    ]
    assert never_struck(faults, Counter({"sink commit.after": 1})) == []


@pytest.mark.parametrize(("end", "flat"), [(100, True), (170, True), (180, False)])
def test_memory_that_grows_by_more_than_ids_is_told(end: int, flat: bool) -> None:
    memory = Memory("sink", [60, 70, 80, 100, 90, 90, 110, 120, 130, end], ids=50)
    assert memory.flat is flat
    assert ("it grew" in str(memory)) is not flat


def test_a_seed_is_a_schedule() -> None:
    faults = schedule(7, 900, 4.0)
    assert faults == schedule(7, 900, 4.0) != schedule(8, 900, 4.0)
    assert len(faults) > 200
    brokers = [fault for fault in faults if fault.target.startswith("kafka")]
    assert all(a.at + a.seconds + 20 <= b.at for a, b in pairwise(brokers))
