"""`tokenhaul verify`: every kind of damage is found, and named by file and row."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiokafka.errors import TopicAuthorizationFailedError
from transformers import AutoTokenizer

from schemas.sequences import FailureReason, Outcome
from services.kernel.errors import Retry
from services.kernel.kafka import Kafka
from services.kernel.objects import open_store
from services.kernel.store import LocalStore
from services.sink import verify as verify_module
from services.sink.accounts import Auditor
from services.sink.verify import NothingToVerify, verify
from tests.support.outcomes import make_failure, make_sequence, numbers_in, write_dataset
from tests.support.s3 import S3Server

TOKENIZER = Path(__file__).parent.parent.parent / "services" / "local" / "data" / "smollm2"
NUMBERS = numbers_in(0, 8)
FIRST, SECOND = f"partition=00000/{0:020d}.parquet", f"partition=00000/{4:020d}.parquet"
SHARDS: list[list[Outcome | bytes]] = [
    [
        make_failure(NUMBERS[4]),
        make_sequence(NUMBERS[0]),
        make_sequence(NUMBERS[1], reasoning_end=5, logprobs=[0.0, 0.0, 0.0]),
        make_failure(NUMBERS[5], FailureReason.NAN),
    ],
    [
        make_sequence(NUMBERS[2], [9, 9], finish_reason="length", matched_stop=None),
        make_sequence(NUMBERS[4]),
        make_sequence(NUMBERS[0]),
        make_sequence(NUMBERS[3], reasoning_end=-1, matched_stop="</s>"),
        b"unreadable",
    ],
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two shards in partition 0: rows 0, 1 | 2, 4, 3; failures 5 and one that cannot be read; 4 superseded."""
    return write_dataset(tmp_path, SHARDS)


def test_a_whole_dataset_and_its_totals(dataset: Path) -> None:
    report = verify(dataset)
    assert report.ok
    assert report == verify(dataset.parent)  # named by itself, or by where it stands
    assert (report.rows, report.shards, report.duplicates, report.superseded, report.truncated) == (5, 2, 1, 1, 1)
    assert report.failures == {"nan": 1, "undecodable": 1}
    assert report.finish_reasons == {"stop": 4, "length": 1}
    assert (report.prompt_tokens, report.output_tokens) == (20, 14)
    assert report.bytes == sum((dataset / file).stat().st_size for file in (FIRST, SECOND))
    assert 0 < report.token_bytes < report.bytes


def test_on_s3(dataset: Path, s3: S3Server) -> None:
    root = s3.fresh_root()
    store = open_store(root)
    for path in dataset.rglob("*.*"):
        store.create(f"{path.relative_to(dataset.parent)}", path.read_bytes())
    local, remote = verify(dataset), verify(f"{root}/test")
    assert remote == msgspec.structs.replace(local, directory=f"{root}/test/")
    assert verify(root).rows == local.rows
    store.create("test/partition=00001/notes.txt", b"")
    store.create(f"test/partition=00001/{0:020d}.parquet", b"no shard")
    assert [problem.file for problem in verify(root).problems] == [
        "partition=00001/notes.txt", f"partition=00001/{0:020d}.parquet"
    ]  # fmt: skip


def footer_of(shard: pq.ParquetFile) -> str:
    return (shard.metadata.metadata or {})[b"tokenhaul"].decode()


def rewrite(path: Path, change_rows: Callable[[list[dict[str, Any]]], None], **footer: Any) -> None:
    """Write a shard again with other rows or another footer, everything else as it was, as before there were seals."""
    shard = pq.ParquetFile(path)
    rows, schema = shard.read().to_pylist(), shard.schema_arrow
    change_rows(rows)
    changed = {**json.loads(footer_of(shard)), "sealed": False, **footer}
    with pq.ParquetWriter(path, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
        writer.add_key_value_metadata({"tokenhaul": json.dumps(changed)})


def nothing(rows: list[dict[str, Any]]) -> None:
    """The rows stay as they are."""


def cell(row: int, **values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[row].update(values)


def element(row: int, name: str, index: int, value: int) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[row][name].__setitem__(index, value)


OF_ANOTHER_PARTITION = make_sequence(numbers_in(1, 1)[0]).prompt.id.hex()
ROW_DAMAGE = [
    (element(1, "input_ids", 0, 5), 1, "the prompt's ids are not those prompt_id was made of"),
    (element(1, "input_ids", 6, 5), 1, "stopped at id 2, but ends with 5"),
    (element(1, "input_ids", 5, -1), 1, "input_ids holds a negative id"),
    (cell(0, input_ids=[1, 2, 3]), 0, "prompt_length 4 \\+ output_length 3 != 3 input_ids"),
    (cell(1, output_length=2), 1, "prompt_length 4 \\+ output_length 2 != 7 input_ids"),
    (cell(1, output_length=0, prompt_length=7), 1, "prompt_length 7 \\+ output_length 0"),
    (element(1, "loss_mask", 3, 1), 1, "loss_mask is not 4 zeros, then ones: wrong from index 3 on"),
    (element(0, "loss_mask", 6, 0), 0, "wrong from index 6 on"),
    (element(0, "loss_mask", 6, 2), 0, "wrong from index 6 on"),
    (cell(0, loss_mask=[0, 0, 0, 0, 1, 1]), 0, "loss_mask has 6 entries for 7 input_ids"),
    (cell(0, input_ids=None), 0, "input_ids is null"),
    (cell(1, id=None), 1, "id is null"),
    (cell(1, sampling=None), 1, "sampling is null"),
    (cell(1, id="0" * 31), 1, "is not 32 hex digits"),
    (cell(1, id=OF_ANOTHER_PARTITION), 1, "belongs to partition 1 of 3"),
    (cell(0, reasoning_end=3), 0, "reasoning_end 3 is not in the output, which is \\[4, 7\\)"),
    (cell(0, reasoning_end=7), 0, "reasoning_end 7 is not in the output"),
    (cell(0, finish_reason="abort"), 0, "finish_reason 'abort' is neither stop nor length"),
    (cell(0, matched_stop="</s>"), 0, "matched_stop '</s>' is neither an id nor a string"),
    (cell(0, model="other"), 0, "model 'other' in a dataset of 'fake'"),
    (cell(0, segments=[1]), 0, "segments add up to 1, output_length is 3"),
    (cell(1, logprobs=[0.0]), 1, "1 logprobs for 3 output ids"),
    (cell(1, kafka_offset=1), 1, "kafka_offset 1 is out of order or of the shard"),
    (cell(1, kafka_offset=4), 1, "kafka_offset 4 is out of order or of the shard"),
    (cell(1, id=make_sequence(NUMBERS[0]).prompt.id.hex()), 1, "comes a second time"),
    (cell(0, id=make_failure(NUMBERS[5]).id.hex()), 0, "is a failure too, and not listed as superseded"),
]


@pytest.mark.parametrize(("damage", "row", "what"), ROW_DAMAGE, ids=[what for _, _, what in ROW_DAMAGE])
def test_damage_in_a_row(dataset: Path, damage: Callable[[Any], None], row: int, what: str) -> None:
    rewrite(dataset / FIRST, damage)
    found = [problem for problem in verify(dataset).problems if problem.row is not None and problem.file == FIRST]
    assert {problem.row for problem in found} == {row}
    assert any(re.search(what, problem.what) for problem in found)


def test_an_id_in_two_shards(dataset: Path) -> None:
    rewrite(dataset / SECOND, cell(2, id=make_sequence(NUMBERS[1]).prompt.id.hex()))
    found = [str(problem) for problem in verify(dataset).problems]
    assert f"{SECOND}, row 2: id {make_sequence(NUMBERS[1]).prompt.id.hex()} comes a second time" in found


FAILED = make_failure(NUMBERS[6]).id.hex()
FOOTER_DAMAGE = [
    ({"start": 5}, "the footer says start 5, it must be 4"),
    ({"dataset": "other"}, "the footer says dataset 'other', it must be 'test'"),
    ({"model": "other"}, "the footer says model 'other'"),
    ({"partition": 1}, "the footer says partition 1, it must be 0"),
    ({"partitions": 4}, "the footer says partitions 4, it must be 3"),
    ({"rows": 2}, "the footer says rows 2, it must be 3"),
    ({"duplicates": 2}, "covers offsets [4, 9), but lists 3 rows, 2 duplicates, 1 failures and a gap of 0"),
    ({"end": 8}, "covers offsets [4, 8), but lists"),
    ({"superseded": []}, "is a failure too, and not listed as superseded"),
    ({"superseded": [FAILED]}, f"superseded {FAILED} is not a row of it that stands for a failure"),
    ({"failures": [[FAILED, "nan"], [FAILED, "nan"]]}, f"failure {FAILED} (nan) is listed before"),
    ({"failures": [[make_failure(NUMBERS[5]).id.hex(), "nan"]]}, "(nan) is listed before"),
    ({"failures": [[make_failure(NUMBERS[0]).id.hex(), "nan"]]}, "(nan) is of a record that has a row"),
    ({"failures": [[OF_ANOTHER_PARTITION, "nan"]]}, "(nan) belongs to partition 1"),
    ({"failures": [["?", "nan"]]}, "failure ? (nan) has no id of 32 hex digits"),
    ({"schema": 2}, "written by a newer tokenhaul"),
    ({"start": None}, "has a footer that cannot be read"),
]


@pytest.mark.parametrize(("footer", "what"), FOOTER_DAMAGE, ids=[what for _, what in FOOTER_DAMAGE])
def test_damage_in_a_footer(dataset: Path, footer: dict[str, Any], what: str) -> None:
    rewrite(dataset / SECOND, nothing, **footer)
    assert any(what in problem.what and problem.file == SECOND for problem in verify(dataset).problems)


def test_a_last_id_that_is_not_the_last_rows(tmp_path: Path) -> None:
    last = make_sequence(NUMBERS[0]).prompt.id.hex()
    whole = write_dataset(tmp_path, [[make_sequence(NUMBERS[0])]])
    rewrite(whole / FIRST, nothing, last_id="0" * 32)
    (problem,) = verify(whole).problems
    assert str(problem) == f"{FIRST}: the footer's last_id is {'0' * 32}, the last row is {last}"


def test_a_missing_shard_is_a_hole(dataset: Path) -> None:
    (dataset / FIRST).unlink()
    assert f"{SECOND}: a hole before it: offsets [0, 4) are in no shard" in map(str, verify(dataset).problems)


def test_an_overlap(dataset: Path) -> None:
    (dataset / FIRST).with_name(f"{2:020d}.parquet").write_bytes((dataset / FIRST).read_bytes())
    found = list(map(str, verify(dataset).problems))
    assert f"partition=00000/{2:020d}.parquet: overlaps the shard before it, which ends at 4" in found
    assert f"partition=00000/{2:020d}.parquet: the footer says start 0, it must be 2" in found


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_torn_file(dataset: Path, keep: float) -> None:
    content = (dataset / FIRST).read_bytes()
    (dataset / FIRST).write_bytes(content[: int(keep if keep >= 1 else len(content) * keep)])
    report = verify(dataset)
    first = report.problems[0]
    assert (first.file, first.row) == (FIRST, None)
    assert "torn" in first.what
    assert not any("hole" in problem.what for problem in report.problems)  # nobody can say where the torn one ended


@pytest.mark.parametrize("name", ["input_ids", "latency_seconds"])
def test_a_flipped_bit(dataset: Path, name: str) -> None:
    chunk = next(
        column
        for column in map(pq.ParquetFile(dataset / FIRST).metadata.row_group(0).column, range(38))
        if column.path_in_schema.split(".")[0] == name
    )
    content = bytearray((dataset / FIRST).read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    (dataset / FIRST).write_bytes(content)
    (problem, *_) = verify(dataset).problems
    assert problem.file == FIRST
    assert "its pages are not what was written" in problem.what


@pytest.mark.parametrize("place", [-40, -9, -8, -6])  # the last two: its length
def test_a_flipped_bit_in_the_metadata(dataset: Path, place: int) -> None:
    content = bytearray((dataset / FIRST).read_bytes())
    content[place] ^= 4
    (dataset / FIRST).write_bytes(content)
    (problem, *_) = verify(dataset).problems
    assert (problem.file, problem.what) == (FIRST, "the file is torn or damaged: its metadata is not what was written")


@pytest.mark.parametrize("place", [-9, -8, -6])
def test_a_flipped_bit_where_the_metadata_is_large(tmp_path: Path, place: int) -> None:
    dataset = write_dataset(tmp_path, [[make_failure(number) for number in numbers_in(0, 1500)]])
    content = bytearray((dataset / FIRST).read_bytes())
    assert int.from_bytes(content[-8:-4], "little") > 64 * 1024
    assert verify(dataset).ok
    content[place] ^= 4
    (dataset / FIRST).write_bytes(content)
    (problem, *_) = verify(dataset).problems
    assert problem.what == "the file is torn or damaged: its metadata is not what was written"


def test_a_shard_whose_seal_was_lost(dataset: Path) -> None:
    rewrite(dataset / FIRST, nothing, sealed=True)
    (problem, *_) = verify(dataset).problems
    assert (problem.file, problem.what) == (FIRST, "the file is damaged: its seal is gone")


def test_pages_of_a_shard_from_before_there_were_seals_have_checksums(dataset: Path) -> None:
    golden = Path(__file__).parent.parent / "golden" / "shard-v1.parquet"
    content = bytearray(golden.read_bytes())
    chunk = pq.ParquetFile(golden).metadata.row_group(0).column(8)
    content[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    (dataset / FIRST).write_bytes(content)
    assert any("could not verify page integrity" in problem.what for problem in verify(dataset).problems)


def test_foreign_files_are_named(dataset: Path) -> None:
    foreign = [
        "notes.txt",
        "partition=00003",  # there are 3 partitions: 0 to 2
        "partition=1",
        "partition=00000/00000.parquet",
        "partition=00000/copy.parquet",
    ]
    for name in foreign:
        (dataset / name).mkdir()
    for hidden in (".tmp", "_snapshots", "partition=00000/.nfs01"):
        (dataset / hidden).mkdir()
    problems = verify(dataset).problems
    assert {problem.file for problem in problems} == set(foreign)
    assert {problem.what for problem in problems} == {"does not belong to the dataset"}


def test_a_file_of_other_columns(dataset: Path) -> None:
    shard = pq.ParquetFile(dataset / FIRST)
    footer = footer_of(shard)
    table = shard.read().drop_columns(["loss_mask"])
    with pq.ParquetWriter(dataset / FIRST, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"tokenhaul": footer.replace('"sealed":true', '"sealed":false')})
    assert f"{FIRST}: its columns are not those of schema 1" in map(str, verify(dataset).problems)


def test_many_problems_are_counted_and_the_first_are_shown(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.sink.report._KEPT_PROBLEMS", 1)
    rewrite(dataset / FIRST, cell(0, model="other"))
    rewrite(dataset / FIRST, cell(1, model="other"))
    report = verify(dataset)
    assert (report.problem_count, len(report.problems)) == (2, 1)
    assert "... and 1 more" in report.text()


def chat(content: str, tokenizer: Any, **prompt: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {"prompt_ids": tokenizer.encode(text), "messages": json.dumps(messages), **prompt}


def test_prompts_are_rendered_again(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    right = make_sequence(NUMBERS[0], prompt=chat("Why is the sky blue?", tokenizer))
    other = chat("Why is grass green?", tokenizer)
    wrong = make_sequence(NUMBERS[1], prompt={**other, "messages": other["messages"].replace("green", "greem")})
    broken = make_sequence(NUMBERS[2], prompt={**other, "messages": '[{"role":"user"}]'})
    text_alone = make_sequence(NUMBERS[3])
    dataset = write_dataset(tmp_path, [[right, text_alone, wrong, broken]])
    assert verify(dataset).ok
    report = verify(dataset, TOKENIZER)
    assert report.rerendered == 3
    assert [(problem.file, problem.row) for problem in report.problems] == [(FIRST, 2), (FIRST, 3)]
    assert "its messages render to" in report.problems[0].what
    assert "cannot be rendered" in report.problems[1].what


def test_what_text_would_have_lost(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    stable = tokenizer.encode("A text comes back as it went.")
    drifting = [*tokenizer.encode("hel"), *tokenizer.encode("lo")]  # one id, or others, when written together
    assert tokenizer.encode(tokenizer.decode(drifting)) != drifting
    close = tokenizer.encode("</think>")
    thought = [*drifting, *close, *stable]
    sequences = [
        make_sequence(NUMBERS[0], [*stable, 2]),
        make_sequence(NUMBERS[1], [*drifting, 2]),
        make_sequence(NUMBERS[2], [*thought, 2], reasoning_end=4 + len(drifting) + len(close) - 1),
        make_sequence(NUMBERS[3], [*stable, 2], reasoning_end=-1),
    ]
    dataset = write_dataset(tmp_path, [sequences])
    report = verify(dataset, TOKENIZER, deep=True)
    drift = report.drift
    assert drift is not None
    assert report.ok  # it is a measure, no fault
    assert (drift.rows, drift.drifted, drift.moved, drift.closed, drift.open) == (4, 2, 1, 1, 1)
    assert drift.longest_reasoning == drift.reasoning_tokens == len(drifting) + len(close)
    assert "2 of 4 outputs (50.00%) would have other ids" in report.text()
    assert verify(dataset, TOKENIZER).drift is None


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    verify_module.configure(parser)
    return verify_module.command(parser.parse_args(arguments))


def test_the_command_on_a_whole_dataset(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(dataset)) == 0
    printed = capsys.readouterr().out
    assert "5 rows (length 1, stop 4), 2 failures (nan 1, undecodable 1), 1 duplicates dropped" in printed
    assert printed.endswith("nothing is wrong\n")


def test_the_command_on_a_damaged_one(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(dataset / FIRST, cell(1, model="other"))
    assert run(str(dataset)) == 1
    assert f"{FIRST}, row 1: model 'other' in a dataset of 'fake'\n" in capsys.readouterr().out
    assert run(str(dataset), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [{"file": FIRST, "row": 1, "what": "model 'other' in a dataset of 'fake'"}]


def test_the_command_where_there_is_nothing(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "elsewhere")) == 2
    assert "is no dataset" in capsys.readouterr().err
    assert run(str(dataset), "--tokenizer", str(tmp_path)) == 2
    assert "no tokenizer can be loaded" in capsys.readouterr().err
    assert run(str(dataset), "--deep") == 2
    assert "--deep needs the model's tokenizer" in capsys.readouterr().err
    assert run(str(dataset), "--audit") == 2
    assert "TOKENHAUL_KAFKA_BOOTSTRAP is not set" in capsys.readouterr().err
    (dataset / "_dataset.json").write_text("{}")
    assert run(str(dataset)) == 2
    assert "does not describe a dataset" in capsys.readouterr().err


def test_a_store_that_goes_away_meanwhile(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (dataset / "partition=00001").mkdir()
    listed = LocalStore.list

    def list_(store: LocalStore, folder: str) -> list[str]:
        if folder.endswith("partition=00001"):
            raise Retry("store", f"{folder}: no answer")
        return listed(store, folder)

    monkeypatch.setattr(LocalStore, "list", list_)
    assert run(str(dataset)) == 2
    assert "not verified to the end: store: partition=00001: no answer" in capsys.readouterr().err


def test_of_several_datasets_one_must_be_named(dataset: Path) -> None:
    other = dataset.parent / "other"
    other.mkdir()
    (other / "_dataset.json").write_bytes((dataset / "_dataset.json").read_bytes())
    with pytest.raises(NothingToVerify, match="holds 2 datasets, name one: other, test"):
        verify(dataset.parent)


def test_partitions_are_looked_at_one_by_one(tmp_path: Path) -> None:
    for partition in range(3):
        write_dataset(tmp_path, [[make_sequence(number) for number in numbers_in(partition, 4)]], partition)
    report = verify(tmp_path)
    assert report.ok
    assert (report.rows, report.shards) == (12, 3)


def test_topics_that_may_not_be_read(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def started(kafka: Kafka, make: Callable[[], Any]) -> AsyncIterator[Any]:
        yield make

    async def begin(*_: object) -> Auditor:
        raise TopicAuthorizationFailedError("t.prompts")

    monkeypatch.setattr(Kafka, "started", started)
    monkeypatch.setattr(Auditor, "begin", begin)
    monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    assert run(str(dataset), "--audit") == 2
    assert "not verified to the end: [Error 29] TopicAuthorizationFailedError: t.prompts" in capsys.readouterr().err
