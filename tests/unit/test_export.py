"""`tokenhaul export`: what trainers get is what the rows hold. Loading by the trainers themselves: tests/trainers."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from schemas.sequences import Sequence
from services.cli import main
from services.dataset import card, spill
from services.dataset.busy import Busy
from services.dataset.specforge import SpecForge
from services.dataset.vocab import Frequencies, draft_vocabulary
from services.kernel.errors import SettingsError
from tests.support.datasets import append, asked_again, sequences
from tests.support.ingest import SMOLLM2, tokenizer
from tests.support.outcomes import make_sequence

VOCAB = ["--vocab-size", "49152", "--no-pt"]


def export(root: Path, format: str, *arguments: object, out: str = "out") -> Path:
    """Run `tokenhaul export` and return the directory it wrote."""
    where = root / out
    words = ["export", format, "--dataset", str(root / "data"), "--out", str(where), *map(str, arguments)]
    assert main(words if "--max-length" in words else [*words, "--max-length", "100"]) == 0
    return where


def lines(folder: Path, pattern: str = "*.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]


def ids(rows: list[dict[str, Any]]) -> set[str]:
    return {row["id"] for row in rows}


def hexes(rows: list[Sequence]) -> set[str]:
    return {row.record_id.hex() for row in rows}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's dataset is to be made, under `data`."""
    monkeypatch.delenv("TOKENHAUL_INGEST_TOKENIZER", raising=False)
    return tmp_path


def test_rows_come_out_token_by_token(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [make_sequence(number, [*range(50, 80), 2]) for number in range(40, 44)]
    made = [*sequences(20), *long]
    append(root / "data", made)
    rows = lines(export(root, "specforge", "--max-length", 20, "--tokens-per-file", 60))
    assert len(list((root / "out").glob("train-*-of-*.jsonl"))) > 1
    by_id = {row["id"]: row for row in rows}
    for sequence in made:
        whole = [*sequence.prompt.prompt_ids, *sequence.output_ids]
        row = by_id.pop(sequence.record_id.hex())
        assert row["input_ids"] == whole[:20]
        assert row["loss_mask"] == ([0] * 4 + [1] * len(sequence.output_ids))[:20]
    assert not by_id
    shown = capsys.readouterr().out
    assert "24 rows, 96 prompt tokens, 124 supervised tokens" in shown
    assert " 4 " in shown
    assert " 60 " in shown, "four rows were cut by 15 tokens each"
    assert "a context of at least 27" in shown


def test_the_order_is_shuffled_and_the_same_whatever_the_order_of_the_shards(root: Path) -> None:
    made = sequences(60)
    append(root / "data", made)
    first = export(root, "specforge")
    other = root / "other"
    for start in (40, 0, 20):
        append(other / "data", reversed(made[start : start + 20]))
    second = export(other, "specforge")
    file = "train-00000-of-00001.jsonl"
    assert (first / file).read_bytes() == (second / file).read_bytes()
    order = [row["id"] for row in lines(first)]
    assert order != [row["id"] for row in lines(export(root, "specforge", "--seed", 1, out="seed"))]
    assert order != sorted(order)


def test_a_conversation_is_trained_on_or_examined_never_both(root: Path) -> None:
    made = [
        make_sequence(number, prompt={"conversation_id": f"chat {number % 30}", "turn": number}) for number in range(90)
    ]
    append(root / "data", made)
    out = export(root, "specforge", "--eval", 0.3)
    train, held = ids(lines(out, "train-*")), ids(lines(out, "eval-*"))
    assert train | held == hexes(made)
    assert not train & held
    conversation = {row.record_id.hex(): row.prompt.conversation_id for row in made}
    examined = {conversation[id] for id in held}
    assert 0 < len(examined) < 30
    assert not examined & {conversation[id] for id in train}


FILTERS: list[tuple[list[object], Callable[[Sequence], bool]]] = [
    (["--finish-reason", "stop"], lambda row: row.finish_reason == "stop"),
    (["--finish-reason", "stop", "--finish-reason", "length"], lambda row: True),
    (["--reasoning-closed"], lambda row: row.reasoning_end != -1),
    (["--source", "chats"], lambda row: row.prompt.source == "chats"),
    (["--min-output", 4], lambda row: len(row.output_ids) >= 4),
    (["--max-output", 4], lambda row: len(row.output_ids) <= 4),
    (["--max-prompt", 4], lambda row: len(row.prompt.prompt_ids) <= 4),
    (["--max-repetition", 0.5], lambda row: len(row.output_ids) < 60),
    (["--where", "revision = 0 and output_length != 4"], lambda row: len(row.output_ids) != 4),
    (["--max-length", 6, "--too-long", "drop"], lambda row: len(row.prompt.prompt_ids + row.output_ids) <= 6),
    (["--max-length", 5], lambda row: len(row.prompt.prompt_ids) < 5),
    (["--max-length", 5, "--dflash"], lambda row: False),
]


@pytest.mark.parametrize(("arguments", "keeps"), FILTERS, ids=[" ".join(map(str, words)) for words, _ in FILTERS])
def test_filters(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], keeps: Callable[[Sequence], bool]
) -> None:
    made = [
        make_sequence(0),
        make_sequence(1, [7, 8, 9, 10], finish_reason="length", matched_stop=None, reasoning_end=-1),
        make_sequence(2, [7, 2], prompt={"source": "chats"}, reasoning_end=4),
        make_sequence(3, [5, 6, 7, 8] * 20, finish_reason="length", matched_stop=None),
        make_sequence(4, prompt={"prompt_ids": [1, 2, 3, 4, 5], "id": make_sequence(4).record_id}),
    ]
    append(root / "data", made)
    kept = [row for row in made if keeps(row)]
    if kept:
        assert ids(lines(export(root, "specforge", *arguments))) == hexes(kept)
    else:
        words = ["export", "specforge", "--dataset", root / "data", "--out", root / "out", *arguments]
        for _ in range(2):
            assert main([str(word) for word in words]) == 1, "nothing was left, which is no success"
            assert f"{root / 'out'} has no rows: all were left out" in capsys.readouterr().out


def test_answers_that_are_nothing_but_their_stop_token_are_left_out(root: Path) -> None:
    empty, short = make_sequence(0, [2]), make_sequence(1, [2], matched_stop="</s>")
    append(root / "data", [empty, short])
    assert ids(lines(export(root, "specforge"))) == hexes([short])
    assert ids(lines(export(root, "specforge", "--keep-empty", out="all"))) == hexes([empty, short])


def test_caps_ratios_and_samples(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many, few = sequences(80), sequences(20, first=200, prompt={"source": "few"})
    append(root / "data", [*many, *few])

    def counts(*arguments: object) -> tuple[int, int]:
        name = "-".join(map(str, arguments)).replace("/", "")
        sources = [row["source"] for row in lines(export(root, "specforge", *arguments, out=name))]
        return sources.count("test"), sources.count("few")

    assert counts("--cap", 30) == (30, 20)
    assert counts("--cap", 30, "--cap", "few=5") == (30, 5)
    assert counts("--ratio", "test=0.5", "--ratio", "few=0.5") == (20, 20)
    assert counts("--ratio", "test=3", "--ratio", "few=1") == (60, 20)
    assert counts("--ratio", "few=1") == (0, 20)
    assert counts("--cap", 50) == (50, 20)
    small, large = (ids(lines(root / f"--cap-{n}")) for n in (30, 50))
    assert small < large, "a larger cap takes the same rows and more"
    sampled = counts("--sample", 0.5)
    assert 25 < sampled[0] < 55
    assert "cap or ratio of its source" in capsys.readouterr().out
    words = ["export", "specforge", "--dataset", str(root / "data"), "--out", str(root / "x"), "--max-length", "9"]
    assert main([*words, "--cap", "nobody=3"]) == 2
    assert "nobody; sources with rows to take are: few, test" in capsys.readouterr().err
    assert main([*words, "--cap", "few=3"]) == 0, "a name that was misspelt stands in nobody's way"
    assert main([*words[:5], str(root / "y"), *words[6:], "--ratio", "0.5"]) == 2
    assert "--ratio '0.5' is not NAME=NUMBER" in capsys.readouterr().err


def test_a_capped_source_is_spread_over_all_files(root: Path) -> None:
    append(root / "data", [*sequences(300), *sequences(60, first=500, prompt={"source": "few"})])
    out = export(root, "specforge", "--cap", "test=60", "--tokens-per-file", 210)
    files = [[row["source"] for row in lines(out, path.name)] for path in sorted(out.glob("*.jsonl"))]
    assert len(files) == 4
    assert max(map(len, files)) < 2 * min(map(len, files))
    assert all(4 < file.count("test") < len(file) - 4 for file in files), "its rows stand together"


def test_snapshots_discards_and_revisions(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = sequences(10)
    append(root / "data", old)
    place = ["--dataset", str(root / "data")]
    assert main(["snapshot", "first", *place]) == 0
    again = asked_again(old[0], 1, [5, 6, 2])
    later = sequences(5, first=50)
    append(root / "data", [*later, again])
    assert main(["discard", "--where", f"id = {later[0].record_id.hex()}", "--reason", "odd", *place]) == 0
    assert ids(lines(export(root, "specforge", out="now"))) == hexes([*old[1:], *later[1:], again])
    assert ids(lines(export(root, "specforge", "--snapshot", "first", out="then"))) == hexes(old)
    assert ids(lines(export(root, "specforge", "--since", "first", out="new"))) == hexes([*later[1:], again])
    assert main(["snapshot", "second", *place]) == 0
    words = ["export", "specforge", *place, "--max-length", "9", "--out", str(root / "never")]
    assert main([*words, "--snapshot", "first", "--since", "second"]) == 2
    assert "nothing came after snapshot 'second'" in capsys.readouterr().err
    card = (root / "now" / "README.md").read_text()
    assert "| discarded | 1 |" in card
    assert "| of an older revision | 1 |" in card


def test_benchmarks_stay_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = root / "benchmark.jsonl"
    text = "A bakery sells seven loaves an hour and opens at nine; how many loaves has it sold at noon?"
    benchmark.write_text(json.dumps({"question": text}) + "\n")

    def asks(number: int, content: str) -> Sequence:
        messages = json.dumps([{"role": "user", "content": content}])
        return make_sequence(number, prompt={"messages": messages})

    same, part, other = asks(0, text), asks(1, f"Please answer. {text} Thanks!"), asks(2, "How far is the moon?")
    append(root / "data", [same, part, other])
    assert ids(lines(export(root, "specforge", "--exclude", benchmark))) == hexes([other])
    assert "overlaps with an excluded text" in capsys.readouterr().out
    append(root / "data", sequences(3, first=10))  # without messages
    words = ["export", "specforge", "--dataset", root / "data", "--out", root / "x", "--max-length", 9]
    assert main([*map(str, words), "--exclude", str(benchmark)]) == 2
    assert "3 rows have none" in capsys.readouterr().err
    out = export(root, "specforge", "--exclude", benchmark, "--where", "messages is not null", out="y")
    assert ids(lines(out)) == hexes([other]), "rows that are left out anyway need not be compared"


@pytest.mark.parametrize(("where", "after"), [("spill", 0), ("spill", 5), ("files", 0), ("files", 2), ("card", 0)])
def test_an_interrupted_export_goes_on_where_it_stopped(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, after: int
) -> None:
    for start in (0, 100, 200):
        append(root / "data", sequences(60, first=start))
    whole = export(root, "specforge", "--tokens-per-file", 300, out="whole")
    part: tuple[Any, str] = {"spill": (spill, "write"), "files": (SpecForge, "write"), "card": (card, "write")}[where]
    work = getattr(*part)
    done: list[None] = []

    def interrupted(*arguments: Any) -> None:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(work(*arguments))

    words = ["export", "specforge", "--dataset", str(root / "data"), "--out", str(root / "out"), "--max-length", "100"]
    monkeypatch.setattr(*part, interrupted)
    assert main([*words, "--tokens-per-file", "300"]) == 130
    assert not (root / "out" / "README.md").exists(), "only a whole export has a card"
    append(root / "data", sequences(10, first=300))  # the stream goes on
    before = {path.name: path.stat().st_mtime_ns for path in (root / "out").glob("*.jsonl")}
    assert len(before) == {"spill": 0, "files": after, "card": len(list(whole.glob("*.jsonl")))}[where]
    monkeypatch.setattr(*part, work)
    assert main([*words, "--tokens-per-file", "301"]) == 2
    assert "holds another export" in capsys.readouterr().err
    assert main([*words, "--tokens-per-file", "300"]) == 0
    for path in whole.glob("*.jsonl"):
        assert (root / "out" / path.name).read_bytes() == path.read_bytes()
        assert before.get(path.name, 0) in (0, (root / "out" / path.name).stat().st_mtime_ns), "it was done already"
    assert len(list((root / "out").glob("*.jsonl"))) == len(list(whole.glob("*.jsonl")))
    assert not (root / "out" / ".export" / "spill").exists()
    capsys.readouterr()
    assert main([*words, "--tokens-per-file", "300"]) == 0
    assert "is done already" in capsys.readouterr().out


def test_a_directory_is_of_one_export_at_a_time(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(root / "data", sequences(3))
    words = ["export", "specforge", "--dataset", str(root / "data"), "--max-length", "9", "--out"]
    (root / "full").mkdir()
    (root / "full" / "mine").touch()
    assert main([*words, str(root / "full")]) == 2
    assert "is not empty" in capsys.readouterr().err
    (root / "out" / ".export").mkdir(parents=True)
    with (root / "out" / ".export" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main([*words, str(root / "out")]) == 2
    assert "another export works in" in capsys.readouterr().err
    assert main([*words, str(root / "out")]) == 0


def test_what_speculators_loads(root: Path) -> None:
    made = sequences(40)
    append(root / "data", made)
    out = export(root, "speculators", "--tokens-per-file", 100, "--eval", 0.2, "--draft-vocab-size", 8, *VOCAB)
    rows = [row for split in ("train", "eval") for row in lines(out / split / "jsonl")]
    assert ids(rows) == hexes(made)
    assert {path.suffix for path in (out / "train" / "jsonl").iterdir()} == {".jsonl"}, "it loads all it finds there"
    arrow = out / "train" / "arrow"
    state = json.loads((arrow / "state.json").read_text())
    assert state["_format_type"] == "torch", "speculators reads tensors; here is no PyTorch"
    (arrow / "state.json").write_text(json.dumps({**state, "_format_type": None}))
    loaded = datasets.load_from_disk(str(arrow))
    assert loaded.features == datasets.Features(
        input_ids=datasets.List(datasets.Value("int64")),
        loss_mask=datasets.List(datasets.Value("int64")),
        seq_len=datasets.Value("int64"),
    )
    expected = [
        {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "seq_len": len(row["input_ids"])}
        for row in lines(out / "train" / "jsonl")
    ]
    assert list(loaded) == expected
    other = export(root, "speculators", "--eval", 0.2, "--seed", 1, "--as", "arrow", "--no-pt", out="other")
    again = json.loads((other / "train" / "arrow" / "state.json").read_text())
    assert again["_fingerprint"] != state["_fingerprint"], "datasets would serve what it cached of the other one"
    assert np.load(arrow / "d2t-8.npy").tolist() == [0, 0, 0, 0, 0, 0, 1, 1]  # 7, 8 and 2 are said


def test_the_rule_of_the_draft_vocabulary() -> None:
    frequencies = Frequencies(np.array([0, 0, 5, 0, 9, 5, 1, 5]))
    mapping = draft_vocabulary(frequencies, 3, vocab_size=10)
    assert mapping.targets.tolist() == [2, 4, 5], "the most frequent; of equals the lowest ids"
    assert mapping.d2t.tolist() == [2, 3, 3]
    assert np.flatnonzero(mapping.t2d).tolist() == [2, 4, 5]
    assert "holds 76.00% of the supervised tokens" in frequencies.coverage(3)
    assert "100.00%" in frequencies.coverage(8)
    padded = draft_vocabulary(frequencies, 8, vocab_size=10)
    assert padded.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7], "the lowest ids fill up what is not there"
    assert draft_vocabulary(frequencies, 10, vocab_size=10).t2d.all()
    with pytest.raises(SettingsError, match="above the model's vocabulary of 10"):
        draft_vocabulary(frequencies, 11, vocab_size=10)
    with pytest.raises(SettingsError, match="the rows hold id 7"):
        draft_vocabulary(frequencies, 3, vocab_size=7)


def test_the_vocabulary_counts_what_is_trained_on_and_nothing_else(root: Path) -> None:
    append(root / "data", [*sequences(10), *(make_sequence(n, [*range(50, 80), 2]) for n in range(20, 24))])
    out = export(root, "vocab", "--max-length", 10, "--draft-vocab-size", 5, *VOCAB)
    counts = np.load(out / "token_freq.npy")
    assert counts.shape == (49152,)
    assert {int(id): int(counts[id]) for id in np.flatnonzero(counts)} == {2: 10, 7: 10, 8: 10} | dict.fromkeys(
        range(50, 56), 4
    )
    assert np.flatnonzero(np.load(out / "t2d-5.npy")).tolist() == [2, 7, 8, 50, 51]
    assert not list(out.glob("*.jsonl"))
    coverage = "A draft vocabulary of 5 tokens holds 70.37% of the supervised tokens to train on (9 distinct ones)."
    assert coverage in (out / "README.md").read_text()


def test_pytorch_is_asked_for_at_the_start_and_only_where_it_is_needed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    append(root / "data", sequences(3))
    common = ["--dataset", str(root / "data"), "--out", str(root / "out"), "--max-length", "9"]
    for words in (["speculators"], ["specforge", "--draft-vocab-size", "5", "--vocab-size", "9"]):
        assert main(["export", *words, *common]) == 2
        assert "pip install 'tokenhaul[torch]'" in capsys.readouterr().err
        assert not (root / "out").exists()


def test_lengths_and_vocabularies_are_held_against_the_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(root / "data", sequences(3))
    common = ["--dataset", str(root / "data"), "--out", str(root / "out"), "--tokenizer", str(SMOLLM2)]
    assert main(["export", "specforge", *common, "--max-length", "8190"]) == 2
    assert "at most --max-length 8185" in capsys.readouterr().err
    assert main(["export", "vocab", *common, "--max-length", "9", "--draft-vocab-size", "50000", "--no-pt"]) == 2
    assert "above the model's vocabulary of 49152" in capsys.readouterr().err
    assert main(["export", "vocab", *common[:4], "--max-length", "9", "--draft-vocab-size", "5", "--no-pt"]) == 2
    assert "needs --vocab-size V, or --tokenizer DIR" in capsys.readouterr().err


def test_conversations_separate_the_reasoning_and_leave_the_rest(root: Path) -> None:
    encode = tokenizer(SMOLLM2).encode
    thought, said = encode(["<think>\nTwo and two.\n</think>", '\n\nFour.<tool_call>{"name": "add"}</tool_call>'])
    messages, tools = '[{"role":"user","content":"2+2?"}]', '[{"type":"function","function":{"name":"add"}}]'
    prompt = {"messages": messages, "tools": tools}
    closed = make_sequence(0, [*thought, *said, 2], reasoning_end=4 + len(thought) - 1, prompt=prompt)
    open_ = make_sequence(1, thought[:-3], reasoning_end=-1, finish_reason="length", matched_stop=None, prompt=prompt)
    plain = make_sequence(2, [*said, 2], prompt={"messages": messages})
    append(root / "data", [closed, open_, plain, *sequences(1, first=9)])
    rows = {row["id"]: row for row in lines(export(root, "conversations", "--tokenizer", SMOLLM2))}
    assert set(rows) == hexes([closed, open_, plain]), "a row without messages cannot be told as text"
    row = rows[closed.record_id.hex()]
    assert row["conversations"] == [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": 'Four.<tool_call>{"name": "add"}</tool_call>',
            "reasoning_content": "Two and two.",
        },
    ]
    assert row["lossy"] is True
    assert row["tools"] == json.loads(tools)
    assert rows[open_.record_id.hex()]["conversations"][-1]["content"] == ""
    assert rows[open_.record_id.hex()]["conversations"][-1]["reasoning_content"].startswith("Two and two")
    assert "reasoning_content" not in rows[plain.record_id.hex()]["conversations"][-1]


def test_a_wrong_close_tag_is_noticed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ids_,) = tokenizer(SMOLLM2).encode(["Thinking about it for quite a while.</think> Yes."])
    row = make_sequence(0, [*ids_, 2], reasoning_end=4 + len(ids_) - 3, prompt={"messages": "[]"})
    append(root / "data", [row])
    words = ["export", "conversations", "--dataset", root / "data", "--out", root / "out", "--max-length", 99]
    assert main([*map(str, words), "--tokenizer", str(SMOLLM2), "--close-tag", "[/THINK]"]) == 2
    assert "not with --close-tag '[/THINK]'" in capsys.readouterr().err


def test_the_card_tells_what_it_is_and_what_it_cost(root: Path) -> None:
    hour = 3600.0
    made = [make_sequence(n, generated_at=1_700_000_000 + n * hour, latency_seconds=hour) for n in range(10)]
    append(root / "data", [*made, *sequences(2, first=30, prompt={"source": "few"})])
    out = export(root, "specforge", "--gpus", 8, "--gpu-hour-price", 2.5)
    card = (out / "README.md").read_text()
    assert "12 rows, 84 tokens" in card
    assert "| few | 2 | 8 | 6 |" in card
    assert '`{"max_new_tokens":64,"stop_token_ids":[2],"temperature":0.0}` | 12 |' in card
    assert "On 8 GPUs that is 80" in card
    assert "per million supervised tokens kept" in card
    for name in ("prompt_lengths.png", "output_lengths.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert name in card


def test_time_at_work_leaves_pauses_out() -> None:
    import pyarrow as pa

    busy = Busy()
    ends = [1000, 1005, 9000]
    busy.add(
        pa.table(
            {
                "generated_at": pa.array([end * 1_000_000 for end in ends], pa.timestamp("us", tz="UTC")),
                "latency_seconds": pa.array([100.0, 100.0, 50.0]),
            }
        )
    )
    assert 155 <= busy.seconds <= 175  # 900 to 1005, and 8950 to 9000, in whole ticks


def test_a_hole_in_a_chain_and_an_unknown_source_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for first in (0, 30, 60):
        append(root / "data", sequences(30, first))
    words = ["export", "specforge", "--dataset", str(root / "data"), "--out", str(root / "out"), "--max-length", "100"]
    assert main([*words, "--source", "nope"]) == 2
    assert "no row is of source nope; there are: " in capsys.readouterr().err
    assert not (root / "out" / "README.md").exists()
    files = sorted((root / "data").rglob("partition=00000/*.parquet"))
    assert len(files) == 3
    for file, told in ((files[1], "its place in the chain is"), (files[0], "a hole in partition")):
        data = file.read_bytes()
        file.unlink()
        assert main(words) == 3
        assert told in capsys.readouterr().err
        file.write_bytes(data)
