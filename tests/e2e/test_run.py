"""`tokenhaul run` as a user starts it: three service processes, a real Kafka, one dataset."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from services.kernel.errors import Fatal
from services.local import kafka as local_kafka
from services.local.run import LOCAL_TOKENIZER
from services.sink.verify import verify
from tests.support.processes import alive, children, fake_engine, kill, tokenhaul, wait_for

DATA = Path(__file__).parent.parent / "data" / "prompts"


def prompts(folder: Path, count: int) -> Path:
    """A file of `count` different prompts, made of real ones."""
    lines = (DATA / "openai_messages.jsonl").read_text().splitlines()
    target = folder / "prompts.jsonl"
    with target.open("w") as file:
        for number in range(count):
            record = json.loads(lines[number % len(lines)])
            record["id"] = f"{record['id']}-{number}"
            record["messages"][0]["content"] += f" ({number})"
            file.write(json.dumps(record) + "\n")
    return target


def generations(log: Path) -> Counter[tuple[int, ...]]:
    """How often a generation was started, by prompt, as the engine noted it."""
    return Counter(tuple(entry["input_ids"]) for entry in noted(log) if entry["type"] == "Started")


def noted(log: Path) -> list[dict[str, Any]]:
    """Its whole lines: the last may be in the making."""
    return [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]


def test_from_a_file_to_a_dataset(tmp_path: Path, broker: str) -> None:
    file = prompts(tmp_path, 200)
    with file.open("a") as more:
        more.write('{"messages": "not a list"}\n')
    with fake_engine(tmp_path) as (url, log):
        run = tokenhaul(
            "run", file, "--max-new-tokens", 64, "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
            "--kafka", broker, "--out", tmp_path / "out",
        )  # fmt: skip
        output, _ = run.communicate(timeout=100)
        assert run.returncode == 0, output
        entries = noted(log)
    logged = {entry["rid"]: entry for entry in entries if entry["type"] == "Ended"}
    assert re.search(r"prompts +│ 200 ", output)
    assert f"refused {file}:201: " in output.replace("\n", "")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "out/out/partition=*/*.parquet"), split="train", cache_dir=tmp_path / "hf"
    )
    assert loaded.num_rows == 200
    for row in loaded:
        engine = logged[row["rids"][-1]]
        assert row["input_ids"] == engine["input_ids"] + engine["output_ids"], "not what the engine was sent and made"
        assert row["loss_mask"] == [0] * len(engine["input_ids"]) + [1] * len(engine["output_ids"])


def test_kill_9_of_every_service_loses_and_repeats_nothing(tmp_path: Path, broker: str) -> None:
    slots, seconds, count = 16, 0.1, 1200
    file = prompts(tmp_path, count)
    with fake_engine(tmp_path, "--slots", str(slots), "--latency", str(seconds)) as (url, log):
        run = tokenhaul(
            "run", file, "--max-new-tokens", 64, "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
            "--kafka", broker, "--out", tmp_path / "out",
            TOKENHAUL_SINK_MAX_ROWS="50", TOKENHAUL_INGEST_BATCH_RECORDS="4",
        )  # fmt: skip
        for service, generated in (("ingest", 50), ("generate", 100), ("sink", 300), ("generate", 500)):
            wait_for(partial(_generated, log, generated), 60)
            wait_for(partial(_runs, run.pid, service), 30)
            kill(children(run.pid)[service])
        output, _ = run.communicate(timeout=110)
        assert run.returncode == 0, output
        started = generations(log)
    assert output.count("was killed: started again") == 4
    report = verify(tmp_path / "out", LOCAL_TOKENIZER)
    assert report.ok, report.text()
    assert (report.rows, report.failures) == (count, {})
    # Of each of the generator's two deaths: what was in flight, and what finished since the last commit (1 s).
    assert sum(started.values()) - count <= 2 * (slots + slots / seconds)


def test_a_generator_killed_five_times_pays_for_no_finished_generation_again(tmp_path: Path, broker: str) -> None:
    slots, seconds, count, kills = 16, 0.1, 2000, 5
    with fake_engine(tmp_path, "--slots", str(slots), "--latency", str(seconds)) as (url, log):
        run = tokenhaul(
            "run", prompts(tmp_path, count), "--max-new-tokens", 64, "--engine", url, "--tokenizer", LOCAL_TOKENIZER,
            "--model", "fake", "--kafka", broker, "--out", tmp_path / "out",
        )  # fmt: skip
        in_flight = 0
        for kill_number in range(kills):
            wait_for(partial(_generated, log, 200 + 300 * kill_number), 120)
            wait_for(partial(_runs, run.pid, "generate"), 60)
            kill(children(run.pid)["generate"])
            entries = [entry["type"] for entry in noted(log)]
            in_flight += 2 * entries.count("Started") - len(entries)
        output, _ = run.communicate(timeout=110)
        assert run.returncode == 0, output
        started = generations(log)
    report = verify(tmp_path / "out", LOCAL_TOKENIZER)
    assert (report.ok, report.rows, report.failures) == (True, count, {}), report.text()
    finished_since_commit = kills * slots / seconds
    print(f"{count} prompts, {kills} kills: {sum(started.values())} generations, {in_flight} in flight at the kills")
    assert sum(started.values()) - count <= in_flight + finished_since_commit


def _generated(log: Path, count: int) -> bool:
    return log.exists() and sum(generations(log).values()) >= count


def _runs(pid: int, service: str) -> bool:
    return service in children(pid)


def test_run_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = prompts(tmp_path, 40)
    with fake_engine(tmp_path) as (url, log):
        for wanted, generates in ((40, True), (60, True), (60, False)):
            prompts(tmp_path, wanted)  # the same ones, and more behind them
            run = tokenhaul(
                "run", file, "--max-new-tokens", 64, "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
                "--out", tmp_path / "out",
            )  # fmt: skip
            output, _ = run.communicate(timeout=100)
            assert run.returncode == 0, output
            assert verify(tmp_path / "out").rows == wanted
            assert ("output tokens/s of this run" in output) == generates
        assert set(generations(log).values()) == {1}


@pytest.mark.long
def test_a_budget_ends_a_run_and_resume_goes_on(tmp_path: Path) -> None:
    """Also a generator that is killed before it could say that it has stopped."""
    with fake_engine(tmp_path, "--slots", "4", "--latency", "0.4") as (url, log):
        arguments = [
            "run", prompts(tmp_path, 120), "--max-new-tokens", 64, "--engine", url, "--tokenizer", LOCAL_TOKENIZER,
            "--model", "fake", "--out", tmp_path / "out",
        ]  # fmt: skip
        run = tokenhaul(*arguments, "--max-rows", 60, TOKENHAUL_GENERATOR_WINDOW="4")
        wait_for(partial(_generated, log, 30), 60)
        kill(children(run.pid)["generate"])
        output, _ = run.communicate(timeout=100)
        assert run.returncode == 0, output
        rows = verify(tmp_path / "out").rows
        assert 60 <= rows < 100
        assert "halted: max_rows 60 reached: 6" in output, output
        assert f"; {120 - rows} prompts wait, --resume goes on" in output.replace("\n", " "), output
        run = tokenhaul(*arguments, "--resume")
        output, _ = run.communicate(timeout=100)
        assert run.returncode == 0, output
        assert "halted" not in output
        assert verify(tmp_path / "out", LOCAL_TOKENIZER).rows == 120


@pytest.mark.parametrize("after", ["start", "work"])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, after: str) -> None:
    file = prompts(tmp_path, 2000)
    with fake_engine(tmp_path, "--latency", "1") as (url, log):
        run = tokenhaul(
            "run",
            file,
            "--max-new-tokens",
            64,
            "--engine",
            url,
            "--tokenizer",
            LOCAL_TOKENIZER,
            "--model",
            "fake",
            "--out",
            tmp_path / "out",
        )
        wait_for(lambda: "kafka" in children(run.pid), 60)
        if after == "work":
            wait_for(lambda: log.exists() and log.stat().st_size > 1000, 60)
        left = children(run.pid)
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=90)
    assert run.returncode == 130, output
    assert f"The same command goes on with --out {tmp_path / 'out'}" in output
    assert not [name for name, pid in left.items() if alive(pid)]


def test_the_parent_killed_takes_its_children_along(tmp_path: Path) -> None:
    run = tokenhaul("run", prompts(tmp_path, 10), "--max-new-tokens", 64, "--out", tmp_path / "out")
    wait_for(lambda: {"kafka", "engine"} <= children(run.pid).keys(), 60)
    left = children(run.pid)
    kill(run.pid)
    run.communicate(timeout=60)
    wait_for(lambda: not [pid for pid in left.values() if alive(pid)], 20)


def test_the_local_engine_answers_in_place_of_a_real_one(tmp_path: Path, broker: str) -> None:
    run = tokenhaul("run", prompts(tmp_path, 6), "--max-new-tokens", 12, "--kafka", broker, "--out", tmp_path / "out")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    report = verify(tmp_path / "out", LOCAL_TOKENIZER)
    assert (report.rows, report.rerendered) == (6, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", 8, "--engine", "http://127.0.0.1:1"], "--engine needs --tokenizer DIR"),
        (["--max-new-tokens", 8, "--tokenizer", LOCAL_TOKENIZER], "--tokenizer needs --engine URL"),
        (
            ["--max-new-tokens", 8, "--tokenizer", LOCAL_TOKENIZER, "--engine", "127.0.0.1:30000"],
            "--engine '127.0.0.1:30000' is no base URL of an SGLang server, as http://host:port",
        ),
        (["--max-new-tokens", 0], "0 is not at least 1"),
        (["--max-new-tokens", 8, "--max-rows", "many"], "MAX_ROWS='many' is not allowed: it takes an integer >= 0"),
        ([], "--max-new-tokens N is required"),
        (["--max-new-tokens", 8, "/no/where.jsonl"], "no such file: /no/where.jsonl"),
        (["--max-new-tokens", 8, __file__], f"no file of prompts by its name: {__file__}; it must end in .jsonl"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: list[object], message: str
) -> None:
    run = tokenhaul("run", "--out", tmp_path / "out", *arguments, prompts(tmp_path, 1))
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_a_run_that_made_no_row_is_no_success_and_says_why(tmp_path: Path, broker: str) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "word " * 3000}) + "\n")
    run = tokenhaul("run", file, "--max-new-tokens", 8, "--kafka", broker, "--out", tmp_path / "out")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 1, output
    assert f"refused {file}:1: prompt_too_long: " in output.replace("\n", "")
    assert "not a single row was made" in output


def test_two_runs_at_once_on_one_directory_are_refused(tmp_path: Path) -> None:
    first = tokenhaul("run", prompts(tmp_path, 1), "--max-new-tokens", 8, "--out", tmp_path / "out")
    wait_for(lambda: "kafka" in children(first.pid), 60)
    second = tokenhaul("run", prompts(tmp_path, 1), "--max-new-tokens", 8, "--out", tmp_path / "out")
    output, _ = second.communicate(timeout=90)
    assert (second.returncode, "another run works in --out" in output) == (2, True)
    first.send_signal(signal.SIGINT)
    assert first.wait(90) == 130


def test_another_set_of_files_goes_into_the_same_dataset(tmp_path: Path, broker: str) -> None:
    """From a file that declares sources, too."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "three"}\n')
    sources = tmp_path / "sources.yaml"
    sources.write_text("sources: [{name: b, files: [b.jsonl], max_new_tokens: 64}]")
    with fake_engine(tmp_path) as (url, _):
        for arguments, rows in (([tmp_path / "a.jsonl", "--max-new-tokens", 64], 2), ([sources], 3)):
            run = tokenhaul(
                "run", *arguments, "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
                "--kafka", broker, "--out", tmp_path / "out",
            )  # fmt: skip
            output, _ = run.communicate(timeout=100)
            assert run.returncode == 0, output
            assert verify(tmp_path / "out").rows == rows


def test_what_is_asked_otherwise_than_before_is_refused_with_what_to_do(tmp_path: Path, broker: str) -> None:
    file = prompts(tmp_path, 2)
    with fake_engine(tmp_path) as (url, _):
        for most, status in ((64, 0), (32, 3)):
            run = tokenhaul(
                "run", file, "--max-new-tokens", most, "--engine", url, "--tokenizer", LOCAL_TOKENIZER,
                "--model", "fake", "--kafka", broker, "--out", tmp_path / "out",
            )  # fmt: skip
            output, _ = run.communicate(timeout=100)
            assert run.returncode == status, output
    assert "ingest cannot go on: source 'prompts' asks otherwise than when" in output
    assert "(max_new_tokens, " in output
    assert "take another --out (`tokenhaul run`), or declare them in a .yaml" in output
    assert '"level"' not in output, "no raw log"


@pytest.mark.parametrize(
    ("missing", "message"),
    [("java", "Kafka needs Java 17 or newer, there is none: install it"), ("mvn", "Maven is not installed")],
)
def test_what_is_missing_is_named_with_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, message: str
) -> None:
    for tool in ("java", "mvn"):
        if tool != missing:
            (tmp_path / tool).write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
            (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "services.local.kafka.shutil.which", lambda name: None if name == missing else str(tmp_path / name)
    )
    with pytest.raises(Fatal, match=message) as refused:
        local_kafka.jars()
    assert "docker compose up" in str(refused.value)
    assert "KAFKA=host:port" in str(refused.value)


def test_kill_9_of_kafka_loses_and_repeats_nothing(tmp_path: Path) -> None:
    file = prompts(tmp_path, 800)
    with fake_engine(tmp_path, "--slots", "16", "--latency", "0.1") as (url, log):
        run = tokenhaul(
            "run", file, "--max-new-tokens", 64, "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
            "--out", tmp_path / "out",
        )  # fmt: skip
        wait_for(partial(_generated, log, 300), 60)
        kill(children(run.pid)["kafka"])
        output, _ = run.communicate(timeout=110)
        assert run.returncode == 0, output
        assert sum(generations(log).values()) == 800, "what was finished waited for Kafka to come back"
    assert "kafka was killed: started again" in output
    assert verify(tmp_path / "out", LOCAL_TOKENIZER).rows == 800
