"""What ingest makes of the tokenizer's speed: `make bench-ingest`.

Chats of Qwen3's ids, from lines in a file to acknowledged transactions, beside the Rust tokenizer alone on the same
rendered texts, in batches of the same size and on the same cores. Kafka's node runs on these cores, too; its CPU is
told apart. It runs as it is deployed, with jemalloc where the machine has it (Debian's libjemalloc2), and without.
With --long: the memory of a file of 10 GB (BENCH_GB says another size).
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path

import msgspec

from services.ingest.tokenizer import ChatTokenizer
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.local.kafka import free_ports
from tests.bench import qwen3
from tests.bench.generator import kafka_node
from tests.bench.table import Line, cpu_seconds, resident_bytes
from tests.support.processes import TOKENHAUL
from tests.support.stream import create_topics

TURNS = (150, 150, 130)  # tokens of a chat's turns, without its template's
CHATS = 24_000
BATCH = 512
ROUNDS = 3
_POLL_SECONDS = 0.5
_SEEN_BYTES = 24  # that the index of ids may take, each
STARTED = 4 * BATCH  # what the start of the process takes is not measured


def measure() -> list[Line]:
    """Wall-clock throughput against the budget; CPU for what the overhead is."""
    allocators = [deployed, ""] if (deployed := find_library("jemalloc")) else [""]
    with tempfile.TemporaryDirectory() as name, kafka_node(folder := Path(name)) as address:
        chats = list(_chats(CHATS))
        file = folder / "chats.jsonl"
        _write(file, chats)
        texts = _rendered(chats)
        _ingest(address, file, CHATS)  # Kafka's node is slow until it has compiled what it does
        rounds = [
            (_raw(texts), *(_ingest(address, file, CHATS, allocator) for allocator in allocators))
            for _ in range(ROUNDS)
        ]
    raw, *ours = zip(*rounds, strict=True)
    tokens = _tokens(texts)
    return [
        line
        for allocator, measured in zip(allocators, ours, strict=True)
        for line in _lines(raw, measured, tokens, allocator, budget=allocator == allocators[0])
    ]


def _lines(
    raw: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]], tokens: float, allocator: str, *,
    budget: bool,
) -> list[Line]:  # fmt: skip
    wall = statistics.median(one[0] / other[0] for one, other in zip(ours, raw, strict=True))
    cpu = statistics.median(other[1] / one[1] for one, other in zip(ours, raw, strict=True))
    rate, cost = statistics.median(one[0] for one in ours), statistics.median(one[1] for one in ours)
    name = "ingest with jemalloc" if allocator else "ingest"
    return [
        Line(
            name=f"{name}, tokenised to acknowledged", value=rate, unit="prompts/s", reference=rate / wall,
            reference_name="encode_batch_fast", at_least=0.8 if budget else None, bounds="ratio",
        ),
        Line(
            name=f"{name}, tokens", value=rate * tokens, unit="tokens/s", reference=rate / wall * tokens,
            reference_name="encode_batch_fast",
        ),
        Line(
            name=f"{name}, CPU of a prompt", value=cost * 1e6, unit="µs", reference=cost * cpu * 1e6,
            reference_name="encode_batch_fast",
        ),
    ]  # fmt: skip


def measure_long() -> list[Line]:
    """Memory while a file much larger than it is read."""
    size = int(float(os.environ.get("BENCH_GB", "10")) * 1e9)
    with tempfile.TemporaryDirectory() as name, kafka_node(folder := Path(name)) as address:
        file = folder / "chats.jsonl"
        with file.open("wb") as out:
            for number, chat in enumerate(_chats(1 << 40)):
                out.write(msgspec.json.encode(chat) + b"\n")
                if number % 1000 == 0 and out.tell() >= size:
                    break
        sizes = _memory(address, file, number + 1)
    count = number + 1
    early, late = max(sizes[: len(sizes) // 5]) - _SEEN_BYTES * count / 5, max(sizes) - _SEEN_BYTES * count
    return [
        Line(
            name=f"ingest, over a file of {size / 1e9:g} GB, {count:,} prompts, without ids seen", value=late / 2**20,
            unit="MiB", reference=early / 2**20, reference_name="over its first fifth", at_most=1.1,
            bounds="ratio",
        )
    ]  # fmt: skip


def _chats(count: int) -> Iterator[dict[str, object]]:
    pieces = qwen3.decode(qwen3.pieces(qwen3.python_text(), sum(TURNS) // 3))
    for number in range(count):
        said = [pieces[(3 * number + turn) % len(pieces)] for turn in range(3)]
        roles = ("user", "assistant", "user")
        yield {
            "id": f"{number}",
            "messages": [
                {"role": role, "content": f"{number}: {text}"} for role, text in zip(roles, said, strict=True)
            ],
        }


def _write(file: Path, chats: list[dict[str, object]]) -> None:
    with file.open("wb") as out:
        out.writelines(msgspec.json.encode(chat) + b"\n" for chat in chats)


def _rendered(chats: list[dict[str, object]]) -> list[str]:
    tokenizer = ChatTokenizer(qwen3.directory())
    return [tokenizer.render(chat["messages"], None, {}) for chat in chats]  # type: ignore[arg-type]


def _tokens(texts: list[str]) -> float:
    some = texts[:BATCH]
    return sum(map(len, qwen3._tokenizer().encode_batch_fast(some, add_special_tokens=False))) / len(some)


def _raw(texts: list[str]) -> tuple[float, float]:
    """(texts/s, CPU seconds of one) of the tokenizer alone, on all cores, its ids taken out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = qwen3._tokenizer()
    began, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False):
            _ = encoding.ids
    return len(texts) / (time.perf_counter() - began), (time.process_time() - cpu) / len(texts)


def _ingest(address: str, file: Path, count: int, allocator: str = "") -> tuple[float, float]:
    """(prompts/s, CPU seconds of one) of the service, from its first transactions to its last."""
    with _running(address, file, allocator) as (process, port):
        first, began = _until(port, STARTED)
        cpu = cpu_seconds(process.pid)
        last, ended = _until(port, count)
        spent = cpu_seconds(process.pid) - cpu
    return (last - first) / (ended - began), spent / (last - first)


def _until(port: int, count: int) -> tuple[float, float]:
    """(prompts published, when the last transaction ended), once there are `count`. Asked seldom: an answer costs the
    service a millisecond."""
    deadline = time.monotonic() + 900
    while (published := _read(port, "tokenhaul_ingest_published_total")) < count:
        assert time.monotonic() < deadline, f"{published} of {count}"
        time.sleep(_POLL_SECONDS)
    return published, _read(port, "tokenhaul_last_record_timestamp_seconds")


def _memory(address: str, file: Path, count: int) -> list[int]:
    """Resident bytes of the service while it reads, the start left out."""
    sizes = []
    with _running(address, file, find_library("jemalloc") or "") as (process, port):
        _until(port, STARTED)
        while _read(port, "tokenhaul_ingest_published_total") < count:
            sizes.append(resident_bytes(process.pid))
            time.sleep(_POLL_SECONDS)
    return sizes


@contextmanager
def _running(address: str, file: Path, allocator: str = "") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    kafka = Kafka(KafkaSettings(bootstrap=[address], prefix=f"bench-{time.time_ns()}"))
    asyncio.run(create_topics(kafka))
    (port,) = free_ports(1)
    sources = file.with_name("sources.yaml")
    sources.write_text(f"sources: [{{name: chats, files: [{file}], max_new_tokens: 1024}}]")
    environ = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"} | {
        "TOKENHAUL_KAFKA_BOOTSTRAP": address,
        "TOKENHAUL_KAFKA_PREFIX": kafka.settings.prefix,
        "TOKENHAUL_METRICS_PORT": str(port),
        "TOKENHAUL_INGEST_SOURCES_FILE": str(sources),
        "TOKENHAUL_INGEST_TOKENIZER": str(qwen3.directory()),
        "TOKENHAUL_INGEST_BATCH_RECORDS": str(BATCH),
        "TOKENHAUL_INGEST_BACKLOG": "0",
        "LD_PRELOAD": allocator,
    }
    log = file.with_name("ingest.log").open("ab")
    process = subprocess.Popen([*TOKENHAUL, "ingest"], env=environ, stdout=log, stderr=log)
    try:
        yield process, port
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def _read(port: int, name: str) -> float:
    """The sum of a metric's samples; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[-1]) for line in lines if re.split("[ {]", line, maxsplit=1)[0] == name)
