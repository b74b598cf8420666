"""inspect, snapshot, discard: what a reader of a dataset sees, on files as the sink writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.sequences import FailureReason
from services.cli import main
from services.dataset import place, where
from services.dataset import snapshot as snapshots
from services.dataset.reader import View, masked
from services.kernel.errors import Fatal, SettingsError
from services.kernel.objects import open_store
from services.sink.rows import SCHEMA
from services.sink.verify import verify
from tests.support.datasets import append, asked_again, sequences
from tests.support.ingest import SMOLLM2
from tests.support.outcomes import make_failure, make_sequence
from tests.support.s3 import S3Server

WORDS = [
    "source", "output_length", "repetition", "clamped", "created_at", "=", "<", "!=", "in", "(", ",", ")", "is", "not",
    "null", "and", "7", "-1.5", "1e999", "nan", "true", "2026-11-30", "'x y'", str(2**63), str(-(2**63)),
]  # fmt: skip


def ids_of(view: View, **options: Any) -> list[str]:
    return [str(id) for table in view.rows(["id"], **options) for id in table.column("id").to_pylist()]


def hexes(*made: Any) -> list[str]:
    return sorted(each.record_id.hex() for each in made)


def test_a_reader_sees_every_row_once_and_only_its_highest_revision(tmp_path: Path) -> None:
    first, second, third = sequences(3)
    append(tmp_path, [first, make_failure(1), third])
    append(tmp_path, [second, first])  # after its failure; a duplicate
    again = asked_again(third, 2, [7, 7, 2])
    between = asked_again(third, 1, [7, 2])
    append(tmp_path, [again])
    append(tmp_path, [between])  # asked later with less: it stays behind
    view = View(place.find(str(tmp_path)))
    assert sorted(ids_of(view)) == hexes(first, second, again)
    assert view.outdated == 2


def test_a_snapshot_keeps_what_was_there_while_the_stream_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path, old := sequences(5))
    assert main(["snapshot", "first", "--dataset", str(tmp_path)]) == 0
    later = [*sequences(3, first=10), asked_again(old[0], 1, [7, 2])]
    append(tmp_path, later)
    assert main(["discard", "--where", "source = test", "--reason", "all", "--dataset", str(tmp_path)]) == 0
    found = place.find(str(tmp_path))
    first = snapshots.load(found, "first")
    assert sorted(ids_of(View(found, first))) == hexes(*old), "what came later changes nothing"
    assert ids_of(View(found)) == []
    now = snapshots.now(found)
    assert sorted(ids_of(View(found, now, since=first), discarded=True)) == hexes(*later)
    capsys.readouterr()
    assert main(["snapshot", "first", "--dataset", str(tmp_path)]) == 2
    assert "exists: a snapshot never changes" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=r"no snapshot 'second' .* there are: first"):
        snapshots.load(found, "second")
    with pytest.raises(SettingsError, match="cannot be called"):
        snapshots.create(found, "../first")


def test_discarded_rows_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = sequences(6)
    spoilt = [make_sequence(number, [9, 9], finish_reason="length", matched_stop=None) for number in range(10, 14)]
    append(tmp_path, [*good, *spoilt])
    arguments = ["discard", "--where", "finish_reason = length", "--dataset", str(tmp_path)]
    assert main(arguments) == 2
    assert "--reason TEXT is required" in capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == 0
    assert "nothing was discarded" in capsys.readouterr().out
    assert len(ids_of(View(place.find(str(tmp_path))))) == 10
    assert main([*arguments, "--reason", "the limit was too low"]) == 0
    assert "4 rows are discarded" in capsys.readouterr().out
    view = View(place.find(str(tmp_path)))
    assert sorted(ids_of(view)) == hexes(*good)
    assert view.discarded == 4
    assert sorted(ids_of(view, discarded=True)) == hexes(*spoilt)
    late = make_sequence(20, [9, 9], finish_reason="length", matched_stop=None)
    append(tmp_path, [late])
    assert sorted(ids_of(View(place.find(str(tmp_path))))) == hexes(*good, late), "what comes later is not excluded"
    report = verify(tmp_path)
    assert (report.ok, report.rows, report.discarded) == (True, 11, 4)
    assert "4 rows where finish_reason = length: the limit was too low" in report.text()


def test_a_damaged_list_of_exclusions_stops_readers_and_is_a_problem_for_verify(tmp_path: Path) -> None:
    append(tmp_path, sequences(3))
    main(["discard", "--where", "source = test", "--reason", "all", "--dataset", str(tmp_path)])
    (listed,) = (tmp_path / "test" / "_exclusions").iterdir()
    listed.write_bytes(listed.read_bytes()[:-20])
    with pytest.raises(Fatal, match="torn or no Parquet file"):
        ids_of(View(place.find(str(tmp_path))))
    assert "_exclusions: " in verify(tmp_path).text()


def test_a_chain_with_a_hole_is_not_read(tmp_path: Path) -> None:
    for number in range(4):
        append(tmp_path, sequences(6, first=6 * number))
    shards = sorted((tmp_path / "test" / "partition=00000").iterdir())
    shards[1].unlink()
    with pytest.raises(Fatal, match="but its place in the chain is"):
        ids_of(View(place.find(str(tmp_path))))


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("repetition >= 0.9", [False, True, True]),
        ("repetition = 0.9", [False, True, False]),
        ("repetition > 0.9", [False, False, True]),
        ("repetition in (0.1, 0.9)", [False, True, False]),
        ("repetition < 1e300", [True, True, True]),
    ],
)
def test_a_number_is_what_it_would_be_in_the_column(text: str, matches: list[bool]) -> None:
    table = pa.table({"repetition": pa.array([0.8, 0.9, 0.95], SCHEMA.field("repetition").type)})
    assert where.parse(text).matches(table).tolist() == matches


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("finish_reason = length", {1}),
        ("finish_reason=length and output_length>=2", {1}),
        ("finish_reason != length", {0, 2}),
        ("output_length > 2", {0, 2}),
        ("revision in (0, 3) and reasoning_end is null", {0, 1}),
        ("output_length in (2, 99999999999)", {1}),
        ("reasoning_end is not null", {2}),
        ("reasoning_end >= -1", {2}),
        ("engine_capped = true", {2}),
        ("generated_at >= 2023-11-14T22:13:22", {1}),
        ("generated_at < '2023-11-14T22:13:22+00:00'", {0, 2}),
        ("""weight_version = "a b'c" """, {0}),
        ("weight_version != nothing", {0}),
    ],
)
def test_conditions(tmp_path: Path, text: str, numbers: set[int]) -> None:
    rows = [
        make_sequence(0, weight_version="a b'c"),
        make_sequence(1, [9, 9], finish_reason="length", matched_stop=None, generated_at=1_700_000_002.0),
        make_sequence(2, reasoning_end=5, engine_capped=True),
    ]
    append(tmp_path, rows)
    condition = where.parse(text)
    found: list[str] = []
    for table in View(place.find(str(tmp_path))).rows(["id", *condition.columns]):
        found += map(str, masked(table, condition.matches(table)).column("id").to_pylist())
    assert sorted(found) == hexes(*[rows[number] for number in numbers])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "ends where a column is expected"),
        ("colour = red", "'colour' is no column; columns are id, prompt_id"),
        ("input_ids = 3", "'input_ids' is no column"),
        ("output_length > 99999999999999999999", "with an integer, not with '99999999999999999999'"),
        ("source ~ x", "'~' is no operator"),
        ("source =", "ends where a value is expected"),
        ("source = a or source = b", "has 'or' where 'and' is expected"),
        ("output_length > many", "output_length is compared with an integer, not with 'many'"),
        ("generated_at > yesterday", "a time like 2026-11-30T08:00"),
        ("engine_capped > true", "it has no order"),
        ("engine_capped = 1", "compared with true or false"),
        ("source in (a, b", "ends where ')' is expected"),
        ("source is missing", "has 'missing' where 'null' is expected"),
        ("source = __import__('os')", "has '(' where 'and' is expected"),
        ('source = "a', "cannot be read from"),
    ],
)
def test_wrong_conditions_say_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(SettingsError) as refused:
        where.parse(text)
    assert what in str(refused.value)


@given(st.text() | st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        condition = where.parse(text)
    except SettingsError:
        return
    empty = pa.table({name: pa.array([None], SCHEMA.field(name).type) for name in condition.columns})
    assert len(condition.matches(empty)) == 1


def test_inspect_shows_every_token_with_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = make_sequence(0, [42, 43, 2], reasoning_end=4)
    append(tmp_path, [row, make_failure(1, FailureReason.NAN)])
    place_and = ["--dataset", str(tmp_path), "--tokenizer", str(SMOLLM2)]
    for id in (row.record_id.hex(), row.prompt.conversation_id):
        assert main(["inspect", id, *place_and]) == 0
        shown = capsys.readouterr().out
        assert "<|im_start|>₁ " in shown, "control tokens are shown, each with its id"
        assert "⏎₁₉₈" in shown, "so is what is invisible"
        assert "<|im_end|>₂ \n" in shown, "and the stop token the output ends with"
        assert "test.jsonl" in shown
        assert row.prompt.sampling["max_new_tokens"] == 64
        assert '"max_new_tokens":64' in shown.replace("\n", "").replace(" ", "")
    assert main(["inspect", make_failure(1).id.hex(), *place_and]) == 1
    assert "ended as a failure: nan" in capsys.readouterr().out
    assert main(["inspect", "f" * 32, *place_and]) == 1
    assert "has no row of a record" in capsys.readouterr().out


def test_inspect_at_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path, [*sequences(20), *sequences(3, first=30, prompt={"source": "rare"})])
    arguments = ["inspect", "--random", "2", "--source", "rare", "--dataset", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("rare") == 2
    assert main([*arguments, "--where", "output_length > 3"]) == 1
    assert main(["inspect", "--dataset", str(tmp_path)]) == 2
    assert main(["inspect", "--random", "1", "--dataset", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no dataset" in capsys.readouterr().err


def test_everything_works_on_s3(s3: S3Server, tmp_path: Path) -> None:
    root = s3.fresh_root()
    append(open_store(root), rows := sequences(6))
    assert main(["snapshot", "all", "--dataset", root]) == 0
    assert main(["discard", "--where", f"id = {rows[0].record_id.hex()}", "--reason", "odd", "--dataset", root]) == 0
    found = place.find(f"{root}/test")
    assert sorted(ids_of(View(found))) == hexes(*rows[1:])
    assert sorted(ids_of(View(found, snapshots.load(found, "all")))) == hexes(*rows)
    assert main(["inspect", rows[1].record_id.hex(), "--dataset", root]) == 0
    words = ["export", "specforge", "--dataset", root, "--max-length", "99", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    exported = (tmp_path / "out" / "train-00000-of-00001.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in exported) == hexes(*rows[1:])
