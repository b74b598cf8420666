"""What a token costs the sink, from the record Kafka delivered to the finished shard, and its index of ids: `make
bench-sink`. With --long: memory over 1 M rows, and 50 M ids read back from shards."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from aiokafka import ConsumerRecord
from numpy.typing import NDArray

from schemas import ids
from schemas.sequences import Sequence
from services.kernel.codec import Encoder, schema_of
from services.kernel.seen import SeenIds
from services.kernel.store import LocalStore
from services.sink import parquet
from services.sink.arrivals import Reader
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim, folder, shard_name
from services.sink.rows import SCHEMA, Row, table
from tests.bench.qwen3 import pieces, python_text
from tests.bench.table import Line, median_line, paired, resident_bytes
from tests.support.outcomes import DATASET, TOPIC, MemoryStore, make_sequence

DATASET_1 = msgspec.structs.replace(DATASET, partitions=1)
TOKENS = 1_000_000
LENGTHS = (500, 2000)
PROMPT_SHARE = 0.4
POLL = 500
ROUNDS = 25
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 2048, "stop_token_ids": [151645]}
MESSAGES = msgspec.json.encode(
    [{"role": "user", "content": "What would a sink have to say about this? " * 12}]
).decode()


def measure() -> list[Line]:
    """Speed, held against Arrow's writing of the same columns with the same compression."""
    lines = []
    for length in LENGTHS:
        records = _records([_sequence(n, piece) for n, piece in enumerate(pieces(python_text()[:TOKENS], length))])
        rows = [arrival.content for arrival in Reader(DATASET_1).read(records)[0]]
        columns = table([row for row in rows if isinstance(row, Row)])

        def ours(records: list[ConsumerRecord] = records) -> float:
            return _speed(lambda: _sink(records))

        def bare(columns: pa.Table = columns) -> float:
            return _speed(lambda: _write(columns))

        speeds, references = paired(ours, bare, ROUNDS)
        common = {"unit": "M tokens/s of CPU", "reference_name": "pq.write_table"}
        name = f"record to shard, rows of {length}"
        lines.append(median_line(speeds, references, name=name, at_least=5.0, **common))
        lines.append(median_line(speeds, references, name=f"{name}, its share", at_least=0.3, bounds="ratio", **common))
    return lines + _index(5_000_000)


def measure_long() -> list[Line]:
    """A process of its own for memory: what this one has had would hide it."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.bench.sink", "memory"], check=True, capture_output=True, text=True
    )
    early, late = map(int, answer.stdout.split())
    return [
        Line(name="memory after 1 M rows", value=late / 2**20, unit="MiB", reference=early / 2**20,
             reference_name="after 200,000", at_most=1.1, bounds="ratio"),
        *_index(50_000_000),
        _rebuild(50_000_000, 2000),
    ]  # fmt: skip


def _sequence(number: int, tokens: list[int]) -> Sequence:
    cut = max(1, int(len(tokens) * PROMPT_SHARE))
    prompt_ids, output = tokens[:cut], tokens[cut:] or [1]
    id = ids.record_id(prompt_ids, DATASET_1.model, SAMPLING, number, 0)
    prompt = {"id": id, "prompt_ids": prompt_ids, "sampling": SAMPLING, "sample_index": number, "messages": MESSAGES}
    return make_sequence(number, output, matched_stop=output[-1], prompt=prompt)


def _records(sequences: list[Sequence], first: int = 0) -> list[ConsumerRecord]:
    encoder = Encoder()
    made = []
    for offset, sequence in enumerate(sequences, first):
        value = encoder.encode(sequence)
        headers = (("schema", schema_of(sequence)), ("id", sequence.record_id))
        made.append(ConsumerRecord(TOPIC, 0, offset, 0, 0, None, value, None, 0, len(value), headers))
    return made


def _speed(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return TOKENS / (time.process_time() - began) / 1e6


def _sink(records: list[ConsumerRecord]) -> None:
    chain = Chain(MemoryStore(), DATASET_1, 0, "bench")
    buffer = Buffer(chain.tail, chain.last_id)
    _take(Reader(DATASET_1), records, chain, buffer)
    if not chain.commit(buffer):
        raise RuntimeError("the shard was not written")


def _take(reader: Reader, records: list[ConsumerRecord], chain: Chain, buffer: Buffer) -> None:
    for start in range(0, len(records), POLL):
        buffer.add(reader.read(records[start : start + POLL])[0], chain.seen, 1.0)


def _write(columns: pa.Table) -> None:
    pq.write_table(columns, pa.BufferOutputStream(), **parquet.WRITING)


def _index(count: int) -> list[Line]:
    """The index of ids: its memory, and looking for as many ids as a large shard has."""
    random = np.random.default_rng(1)
    seen, known = SeenIds(), _random_ids(random, 5000)
    seen.add(known)
    for _ in range(count // 1_000_000):
        seen.add(_random_ids(random, 1_000_000))
    speed = statistics.median(_lookups(seen, _random_ids(random, 5000)) for _ in range(200))
    if not seen.contains(known).all():
        raise RuntimeError("an id was lost")
    label = f"index of {count / 1e6:.0f} M ids"
    return [
        Line(name=f"{label}, memory", value=seen.nbytes / len(seen), unit="bytes/id", at_most=24.0),
        Line(name=f"{label}, batches of 5,000", value=speed / 1e6, unit="M lookups/s of CPU", at_least=1.0),
    ]


def _lookups(seen: SeenIds, batch: NDArray[np.uint64]) -> float:
    """A second of CPU."""
    began = time.process_time()
    seen.contains(batch)
    return len(batch) / (time.process_time() - began)


def _random_ids(random: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return random.integers(0, 2**64, (count, 2), dtype=np.uint64)


def _rebuild(count: int, shards: int) -> Line:
    """What an assignment costs: a chain of `shards` files is read, ids and footers."""
    random = np.random.default_rng(2)
    rows = count // shards
    with tempfile.TemporaryDirectory() as root:
        store = LocalStore(Path(root))
        claim(store, DATASET_1)
        for number in range(shards):
            data = _shard(number * rows, rows, random)
            store.create(f"{DATASET_1.name}/{folder(0)}/{shard_name(number * rows)}", data)
        chain = Chain(store, DATASET_1, 0, "bench")
        began = time.monotonic()
        chain.refresh()
        seconds = time.monotonic() - began
        if len(chain.seen.rows) != count:
            raise RuntimeError(f"{len(chain.seen.rows)} ids of {count} were found")
    name = f"{count / 1e6:.0f} M ids read back from {shards:,} shards"
    return Line(name=name, value=seconds, unit="s", at_most=60.0)


def _shard(start: int, rows: int, random: np.random.Generator) -> bytes:
    """Right in its ids and its footer; all else is empty, for nobody looks at it."""
    hexed = random.bytes(16 * rows).hex()
    names = pa.array([hexed[at : at + 32] for at in range(0, len(hexed), 32)])
    empty = {field.name: pa.nulls(rows, field.type) for field in SCHEMA if field.name != "id"}
    footer = parquet.Footer(
        dataset=DATASET_1.name, model=DATASET_1.model, partition=0, partitions=1, start=start, end=start + rows,
        last_id=None, rows=rows, duplicates=0, failures=[], superseded=[], gap=0, writer="", attempt="", created_at=0.0,
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd", compression_level=1) as writer:
        writer.write_table(pa.table({"id": names, **empty}, SCHEMA))
        writer.add_key_value_metadata({parquet.FOOTER_KEY: msgspec.json.encode(footer).decode()})
    return sink.getvalue().to_pybytes()


def _memory() -> None:
    """1 M rows through one process, in shards of 5,000; print its size after 200,000 and after all, without the ids."""
    with tempfile.TemporaryDirectory() as root:
        store = LocalStore(Path(root))
        claim(store, DATASET_1)
        chain, reader = Chain(store, DATASET_1, 0, "bench"), Reader(DATASET_1)
        text = pieces(python_text()[:100_000], 100)
        sizes = []
        for start in range(0, 1_000_000, 5000):
            sequences = [_sequence(start + n, text[n % len(text)]) for n in range(5000)]
            buffer = Buffer(chain.tail, chain.last_id)
            _take(reader, _records(sequences, start), chain, buffer)
            chain.commit(buffer)
            if start + 5000 in (200_000, 1_000_000):
                sizes.append(resident_bytes(os.getpid()) - chain.seen.nbytes)
        print(*sizes)


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        _memory()
