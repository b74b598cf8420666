"""From measured costs to fleets: the tables of docs/scaling.md.

    python -m tests.bench.scaling          write them anew

What was measured stands in COSTS, what is assumed of prompts and GPUs in WORK: put yours there.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one record, on a core of the machine named in docs/scaling.md. CPU in seconds, sizes in bytes."""

    ingest_token: float = 1.75e-6
    generator_record: float = 0.44e-3
    generator_token: float = 0.12e-6
    generator_engine: float = 0.8e-3  # a second and engine, to follow its load
    sink_record: float = 0.06e-3
    sink_token: float = 0.11e-6
    recover_record: float = 5e-6  # ingest at its start, of every prompt on the topic
    prompt: float = 255
    prompt_token: float = 3.1  # its id and its text
    sequence: float = 380
    sequence_token: float = 1.2  # of the output; the prompt's cost as on the prompts topic
    row: float = 400
    row_token: float = 1.05
    row_text_token: float = 1.2
    seen_id: float = 16


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prompt and of an output; output tokens a second and requests running of each GPU."""

    prompt_tokens: int = 500
    output_tokens: int = 2000
    gpu_rate: float = 2500
    gpu_running: int = 64
    engine_gpus: int = 8


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of GPUs needs beside it."""

    gpus: int
    records: float  # a second
    in_flight: int
    generator_cores: float
    generators: int
    partitions: int
    sink_cores: float
    ingest_cores: float
    topic_rate: float  # bytes a second written to Kafka, before replication
    retained: float  # bytes of sequences of seven days, before replication


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of prompts needs on a fleet."""

    prompts: int
    gpus: int
    days: float
    prompts_topic: float
    sequences_topic: float
    brokers: int
    shards: int
    shards_bytes: float
    requests: int  # to the object store, to write them
    ingest_ids: float
    ingest_start: float  # seconds
    sink_ids: float
    sink_start: float  # seconds until the longest chain is read, one sink for all partitions


COSTS, WORK = Costs(), Work()
GPUS = (8, 64, 256, 1000)
PROMPTS = (88_000, 10_000_000, 1_000_000_000)
BUSY = 0.6  # of a core, so that rebalances and bursts find room
WINDOW = 4000  # requests in flight of one generator process: sockets, memory, and what one kill -9 costs
REPLICATION = 3
BROKER_DISK = 4e12
RETENTION_DAYS = 7
SHARD_ROWS, SHARD_SECONDS, SHARD_REQUESTS = 5000, 300, 3
REQUEST_SECONDS = 0.02
LOADING = 2  # chains a sink reads at once
_PENDING_PER_PARTITION = 1500  # of 2-byte gaps in the metadata of a commit
_DAY = 86_400.0


def fleet(gpus: int, costs: Costs = COSTS, work: Work = WORK) -> Fleet:
    """What `gpus` keep busy."""
    records = gpus * work.gpu_rate / work.output_tokens
    tokens = work.prompt_tokens + work.output_tokens
    in_flight = gpus * work.gpu_running
    cores = records * (costs.generator_record + costs.generator_token * tokens)
    following = costs.generator_engine * gpus / work.engine_gpus
    generators = max(math.ceil(cores / (BUSY - min(following, BUSY / 2))), math.ceil(in_flight / WINDOW), 2)
    pending = 2 * in_flight
    rate = records * (_prompt(costs, work) + _sequence(costs, work))
    return Fleet(
        gpus=gpus,
        records=records,
        in_flight=in_flight,
        generator_cores=cores + following * generators,
        generators=generators,
        partitions=max(12, _power(4 * generators), _power(pending / _PENDING_PER_PARTITION)),
        sink_cores=records * (costs.sink_record + costs.sink_token * tokens),
        ingest_cores=records * costs.ingest_token * work.prompt_tokens,
        topic_rate=rate,
        retained=records * _sequence(costs, work) * RETENTION_DAYS * _DAY,
    )


def dataset(prompts: int, gpus: int, costs: Costs = COSTS, work: Work = WORK) -> Dataset:
    """What `prompts` become on `gpus`."""
    needs = fleet(gpus, costs, work)
    seconds = prompts / needs.records
    shards = max(prompts / SHARD_ROWS, min(prompts, needs.partitions * seconds / SHARD_SECONDS))
    prompts_topic = prompts * _prompt(costs, work)
    sequences_topic = min(prompts, needs.records * RETENTION_DAYS * _DAY) * _sequence(costs, work)
    tokens = work.prompt_tokens + work.output_tokens
    row = costs.row + costs.row_token * tokens + costs.row_text_token * work.prompt_tokens
    at_once = min(LOADING, needs.partitions)
    return Dataset(
        prompts=prompts,
        gpus=gpus,
        days=seconds / _DAY,
        prompts_topic=prompts_topic,
        sequences_topic=sequences_topic,
        brokers=max(3, math.ceil((prompts_topic + sequences_topic) * REPLICATION / BROKER_DISK)),
        shards=math.ceil(shards),
        shards_bytes=prompts * row,
        requests=math.ceil(shards),
        ingest_ids=prompts * costs.seen_id,
        ingest_start=prompts * costs.recover_record,
        sink_ids=prompts * costs.seen_id,
        sink_start=shards * SHARD_REQUESTS * REQUEST_SECONDS / at_once,
    )


def _prompt(costs: Costs, work: Work) -> float:
    return costs.prompt + costs.prompt_token * work.prompt_tokens


def _sequence(costs: Costs, work: Work) -> float:
    return costs.sequence + costs.prompt_token * work.prompt_tokens + costs.sequence_token * work.output_tokens


def _power(number: float) -> int:
    """The power of two from there on."""
    return int(2 ** math.ceil(math.log2(max(1, number))))


def fleets_table() -> str:
    """Markdown."""
    rows = [
        "| GPUs | records/s | in flight | generator cores | generator pods | partitions | sink cores | ingest cores | "
        "to Kafka | sequences of 7 days |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        f = fleet(gpus)
        rows.append(
            f"| {gpus:,} | {f.records:,.0f} | {f.in_flight:,} | {f.generator_cores:.2f} | {f.generators} "
            f"| {f.partitions} | {f.sink_cores:.2f} | {f.ingest_cores:.2f} "
            f"| {f.topic_rate / 1e6:.2f} MB/s | {_size(f.retained)} |"
        )
    return "\n".join(rows)


def datasets_table() -> str:
    """Markdown."""
    rows = [
        "| prompts | GPUs | takes | prompts topic | sequences topic | brokers | shards | dataset | ids in ingest | "
        "ingest starts in | ids in sinks | one sink starts in |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for prompts in PROMPTS:
        for gpus in GPUS:
            d = dataset(prompts, gpus)
            rows.append(
                f"| {_count(prompts)} | {gpus:,} | {_time(d.days * _DAY)} | {_size(d.prompts_topic)} "
                f"| {_size(d.sequences_topic)} | {d.brokers} | {d.shards:,} | {_size(d.shards_bytes)} "
                f"| {_size(d.ingest_ids)} | {_time(d.ingest_start)} | {_size(d.sink_ids)} | {_time(d.sink_start)} |"
            )
    return "\n".join(rows)


def _size(count: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    for unit, factor in (("years", 365 * _DAY), ("days", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s"


def _count(number: int) -> str:
    for unit, factor in ((" B", 10**9), (" M", 10**6), (" k", 1000)):
        if number >= factor:
            return f"{number / factor:g}{unit}"
    return str(number)


def filled(page: str) -> str:
    """The page with its tables as they are now."""
    for name, table in (("fleets", fleets_table()), ("datasets", datasets_table())):
        begin, end = f"<!-- {name}: made by tests/bench/scaling.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
