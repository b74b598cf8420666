"""Shards as files: what goes in comes out, small, and opens in the tools people use."""

from __future__ import annotations

import datetime
import json
import random
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from schemas import ids
from services.kernel.store import LocalStore
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim
from services.sink.parquet import DamagedShard, open_shard, row_ids
from services.sink.repetition import NGRAM, repetition
from services.sink.rows import SCHEMA
from services.sink.verify import verify
from tests.support.outcomes import DATASET, MemoryStore, fill, make_failure, make_sequence, numbers_in, write_dataset

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "golden" / "shard-v1.parquet"
PROMPTS = TESTS / "data" / "prompts"
TOKENIZER = TESTS.parent / "services" / "local" / "data" / "smollm2"
NUMBERS = numbers_in(0, 8)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(pq.ParquetFile(path).read().to_pylist())


def first_shard(directory: Path) -> Path:
    return directory / "partition=00000" / "00000000000000000000.parquet"


def test_every_value_comes_out_as_it_went_in(tmp_path: Path) -> None:
    sequence = make_sequence(
        NUMBERS[0],
        [30, 31, 32],
        finish_reason="length",
        matched_stop=None,
        reasoning_end=-1,
        logprobs=[-0.5, -1.0, -2.0],
        rids=["a", "b"],
        attempts=2,
        engine_capped=True,
        segments=[2, 1],
        num_retractions=1,
        engine_version="0.5.9",
        weight_version="default",
        prompt={
            "messages": '[{"role":"user","content":"ä\\u0000"}]',
            "tools": "[]",
            "chat_template_kwargs": {"thinking": True},
            "metadata": {"a": [1, None]},
            "turn": 2,
            "revision": 1,
            "sample_index": 3,
            "clamped": True,
        },
    )
    directory = write_dataset(tmp_path, [[sequence, make_sequence(NUMBERS[1])]])
    first, second = rows_of(first_shard(directory))
    prompt = sequence.prompt
    assert [field.name for field in pq.read_schema(first_shard(directory))] == list(first)
    assert first == {
        "id": prompt.id.hex(),
        "prompt_id": ids.prompt_id(prompt.prompt_ids).hex(),
        "conversation_id": prompt.conversation_id,
        "sample_index": 3,
        "revision": 1,
        "source": "test",
        "source_ref": json.dumps({"file": "test.jsonl", "row": NUMBERS[0] + 1}, separators=(",", ":")),
        "turn": 2,
        "input_ids": [*prompt.prompt_ids, 30, 31, 32],
        "loss_mask": [0] * len(prompt.prompt_ids) + [1, 1, 1],
        "prompt_length": len(prompt.prompt_ids),
        "output_length": 3,
        "reasoning_end": -1,
        "finish_reason": "length",
        "matched_stop": None,
        "engine_capped": True,
        "repetition": 0.0,
        "model": "fake",
        "engine_version": "0.5.9",
        "weight_version": "default",
        "num_retractions": 1,
        "tokenizer_fingerprint": "none",
        "sampling": json.dumps({**prompt.sampling, "sampling_seed": prompt.seed}, separators=(",", ":")),
        "chat_template_kwargs": '{"thinking":true}',
        "effective_max_new_tokens": 64,
        "clamped": True,
        "segments": [2, 1],
        "messages": prompt.messages,
        "tools": "[]",
        "metadata": '{"a":[1,null]}',
        "logprobs": [-0.5, -1.0, -2.0],
        "request_id": ids.request_id(prompt.prompt_ids, "fake", 3).hex(),
        "rids": ["a", "b"],
        "attempts": 2,
        "latency_seconds": 0.5,
        "created_at": datetime.datetime.fromtimestamp(1_700_000_000.25, datetime.UTC),
        "generated_at": datetime.datetime.fromtimestamp(1_700_000_001.5, datetime.UTC),
        "kafka_offset": 0,
    }
    assert (second["logprobs"], second["reasoning_end"], second["messages"]) == (None, None, None)
    assert second["input_ids"][-1] == 2


def test_the_footer_says_what_the_shard_is(tmp_path: Path) -> None:
    failed, row, other = NUMBERS[:3]
    directory = write_dataset(
        tmp_path,
        [[make_failure(failed), make_failure(other)], [make_sequence(row), make_sequence(row), make_sequence(failed)]],
    )
    path = directory / "partition=00000" / "00000000000000000002.parquet"
    with path.open("rb") as file:
        shard, footer = open_shard(file, str(path))
        assert row_ids(shard).astype(">u8").tobytes() == make_sequence(row).prompt.id + make_sequence(failed).prompt.id
    assert (footer.start, footer.end, footer.rows, footer.duplicates, footer.failures) == (2, 5, 2, 1, [])
    assert footer.superseded == [make_sequence(failed).prompt.id.hex()]
    assert footer.last_id == make_sequence(failed).prompt.id.hex()
    assert (footer.dataset, footer.model, footer.partition, footer.partitions) == ("test", "fake", 0, 3)
    with first_shard(directory).open("rb") as file:
        _, footer = open_shard(file, "")
    assert footer.failures == [(make_failure(number).id.hex(), "engine_rejected") for number in (failed, other)]


def test_token_columns_have_no_dictionary_and_take_few_bytes(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    text = tokenizer.encode("".join(path.read_text() for path in sorted(PROMPTS.glob("*.jsonl"))))
    outputs = [text[start : start + 500] for start in range(0, len(text), 500)]
    sequences = [
        make_sequence(number, output, matched_stop=None, finish_reason="length")
        for number, output in zip(numbers_in(0, len(outputs)), outputs, strict=True)
    ]
    path = first_shard(write_dataset(tmp_path, [sequences]))
    metadata = pq.ParquetFile(path).metadata
    chunks = [metadata.row_group(0).column(index) for index in range(metadata.num_columns)]
    of_tokens = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in ("input_ids", "loss_mask")]
    assert len(of_tokens) == 2
    for chunk in of_tokens:
        assert not chunk.has_dictionary_page
        assert chunk.compression == "ZSTD"
    tokens = sum(len(sequence.prompt.prompt_ids) + len(sequence.output_ids) for sequence in sequences)
    assert sum(chunk.total_compressed_size for chunk in of_tokens) / tokens <= 1.10
    assert {chunk.path_in_schema for chunk in chunks if chunk.is_stats_set} >= {"prompt_length", "output_length"}


def test_row_groups_are_bounded_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.sink.parquet._GROUP_TOKENS", 1000)
    directory = write_dataset(tmp_path, [[make_sequence(number, [9] * 495 + [2]) for number in NUMBERS]])
    assert pq.ParquetFile(first_shard(directory)).metadata.num_row_groups == 4
    assert verify(tmp_path).ok


def test_datasets_opens_it_as_it_is(tmp_path: Path) -> None:
    # A shard whose optional columns are all null, one where they are not, one without rows.
    full = make_sequence(
        NUMBERS[1], logprobs=[0.0, 0.0, 0.0], reasoning_end=4, prompt={"messages": "[]", "tools": "[]"}
    )
    directory = write_dataset(tmp_path, [[make_sequence(NUMBERS[0])], [full], [full], [make_failure(NUMBERS[2])]])
    loaded = datasets.load_dataset(
        "parquet", data_files=f"{directory}/**/*.parquet", split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.column_names == SCHEMA.names
    assert [row["id"] for row in loaded] == [make_sequence(number).prompt.id.hex() for number in NUMBERS[:2]]
    assert loaded[0]["input_ids"][-3:] == [7, 8, 2]
    assert loaded[0]["loss_mask"][-4:] == [0, 1, 1, 1]
    assert loaded[1]["reasoning_end"] == 4
    assert loaded.features["input_ids"] == datasets.List(datasets.Value("int32"))


def test_a_shard_of_the_first_version_opens() -> None:
    """GOLDEN was written by services.sink on the day the format was laid down: it must open for ever."""
    with GOLDEN.open("rb") as file:
        shard, footer = open_shard(file, str(GOLDEN))
        first, second = shard.read().to_pylist()
    assert (footer.schema, footer.start, footer.end, footer.rows, footer.duplicates) == (1, 0, 5, 2, 1)
    assert [reason for _, reason in footer.failures] == ["engine_rejected", "nan"]
    assert footer.superseded == [second["id"]]
    assert first["input_ids"] == [1, 1000 + NUMBERS[0], 2, 198, 163606, 9, 163607, 10, 2]
    assert first["loss_mask"] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert first["reasoning_end"] == 6
    assert first["logprobs"] == [-0.5, -0.25, 0.0, -1.0, -2.0]
    assert second["messages"] == '[{"role":"user","content":"hi"}]'


def test_a_chain_goes_on_after_shards_of_the_first_version(tmp_path: Path) -> None:
    """As in a rolling update: what the old one wrote is known, and what comes now follows it."""
    with GOLDEN.open("rb") as file:
        golden = pq.ParquetFile(file).read()
    store = LocalStore(tmp_path)
    claim(store, DATASET)
    store.create(f"test/partition=00000/{0:020d}.parquet", GOLDEN.read_bytes())
    chain = Chain(store, DATASET, 0, "writer")
    chain.refresh()
    assert chain.tail == 5
    known = {id: number for number in NUMBERS for id in [make_sequence(number).prompt.id.hex()]}
    old = [known[str(id)] for id in golden.column("id").to_pylist()]
    new = next(number for number in numbers_in(0, 20) if number not in NUMBERS)
    buffer = fill(Buffer(chain.tail, chain.last_id), chain, [*(make_sequence(n) for n in old), make_sequence(new)])
    assert (buffer.duplicates, len(buffer.rows)) == (2, 1)
    assert chain.commit(buffer)
    report = verify(tmp_path)
    assert report.problems == []
    assert (report.shards, report.rows, report.duplicates) == (2, 3, 3)
    files = str(tmp_path / "test" / "*" / "*.parquet")
    assert len(datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "c"))) == 3


def test_damage_is_named(tmp_path: Path) -> None:
    path = first_shard(write_dataset(tmp_path, [[make_sequence(NUMBERS[0])]]))
    whole = path.read_bytes()
    for content, message in ((whole[: len(whole) // 2], "torn"), (b"", "torn"), (b"PAR1", "torn")):
        path.write_bytes(content)
        with path.open("rb") as file, pytest.raises(DamagedShard, match=f"here is {message}"):
            open_shard(file, "here")
    pq.write_table(SCHEMA.empty_table(), path)
    with path.open("rb") as file, pytest.raises(DamagedShard, match="no shard of tokenhaul"):
        open_shard(file, "here")


def test_a_newer_shard_is_not_read_as_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    written = Chain(store, DATASET, 0, "writer")
    written.commit(fill(Buffer(0, None), written, [make_sequence(NUMBERS[0])]))
    monkeypatch.setattr("services.sink.parquet.VERSION", 0)
    with pytest.raises(DamagedShard, match="written by a newer tokenhaul"):
        Chain(store, DATASET, 0, "writer").refresh()


def covered(output: list[int]) -> float:
    """The definition of repetition, word by word."""
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(output)
    for start in range(len(output) - NGRAM + 1):
        ngram = tuple(output[start : start + NGRAM])
        if ngram in seen:
            inside[start : start + NGRAM] = [True] * NGRAM
        seen.add(ngram)
    return sum(inside) / max(len(output), 1)


@given(st.lists(st.lists(st.integers(0, 2) | st.integers(0, 2**31 - 1), max_size=80), max_size=12))
def test_repetition_is_what_its_definition_says(outputs: list[list[int]]) -> None:
    flat = np.array([id for output in outputs for id in output], np.int32)
    shares = repetition(flat, np.array([len(output) for output in outputs], np.int64))
    assert shares.tolist() == pytest.approx([covered(output) for output in outputs])


def test_repetition_over_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    outputs = [[draw.randrange(3) for _ in range(draw.randrange(60))] for _ in range(200)]
    monkeypatch.setattr("services.sink.repetition._CHUNK_TOKENS", 50)
    shares = repetition(np.array(list(chain.from_iterable(outputs)), np.int32), np.array(list(map(len, outputs))))
    assert shares.tolist() == pytest.approx([covered(output) for output in outputs])


def test_repetition_of_loops_and_of_plain_text() -> None:
    loop, plain = [5, 6, 7] * 100, list(range(300))
    shares = repetition(np.array(loop + plain, np.int32), np.array([300, 300], np.int64))
    assert shares[0] > 0.98
    assert shares[1] == 0
