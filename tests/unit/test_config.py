"""`tokenhaul config`: nothing hidden but secrets, and wrong values named. And what tools refuse before they connect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services import cli


def config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **environ: str) -> tuple[int, str]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    status = cli.main(["config", "--json"])
    return status, capsys.readouterr().out


def test_every_setting_is_shown_with_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = config(
        monkeypatch, capsys,
        TOKENHAUL_KAFKA_SASL_PASSWORD="hunter2", TOKENHAUL_GENERATOR_WINDOW="8", TOKENHAUL_SINK_ROOT="/data",
    )  # fmt: skip
    shown = {one["variable"].removeprefix("TOKENHAUL_"): one for one in json.loads(told)}
    assert status == 0
    assert "hunter2" not in told
    assert (shown["KAFKA_SASL_PASSWORD"]["value"], shown["GENERATOR_WINDOW"]["value"]) == (
        "***",
        "8",
    )
    assert shown["GENERATOR_WINDOW"]["origin"] == "environment"
    assert (shown["SINK_MAX_ROWS"]["origin"], shown["SINK_MAX_ROWS"]["value"]) == (
        "default",
        "5000",
    )
    assert (shown["KAFKA_BOOTSTRAP"]["origin"], shown["KAFKA_BOOTSTRAP"]["value"]) == (
        "missing",
        None,
    )


def test_a_wrong_one_is_named_and_is_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = config(monkeypatch, capsys, TOKENHAUL_GENERATOR_WINDOW="many")
    assert status == 2
    problems = {one["variable"]: one["problem"] for one in json.loads(told) if one["problem"]}
    assert problems == {
        "TOKENHAUL_GENERATOR_WINDOW": "TOKENHAUL_GENERATOR_WINDOW='many' is not allowed: it takes an integer >= 0"
    }


def test_a_password_in_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = config(
        monkeypatch, capsys,
        TOKENHAUL_SINK_ROOT="s3://key:hunter2@bucket/x", TOKENHAUL_GENERATOR_ENGINES="http://user:hunter2@host",
    )  # fmt: skip
    assert status == 2
    assert "s3://***@bucket/x" in told
    assert "hunter2" not in told


def test_push_and_run_show_no_password_that_stands_in_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "s.jsonl").write_text('{"prompt": "Hi"}')
    engine = ["--tokenizer", str(tmp_path), "--engine", "http://user:hunter2@host"]
    for arguments, place in (
        (
            ["push", str(file), "--source", "s", "--url", "http://user:hunter2@127.0.0.1:1"],
            "TOKENHAUL_INGEST_HTTP_TOKEN",
        ),
        (["run", str(file), "--max-new-tokens", "8", *engine], "TOKENHAUL_GENERATOR_API_KEY"),
    ):
        assert cli.main(arguments) == 2
        printed = capsys.readouterr().err
        assert "http://***@" in printed
        assert place in printed
        assert "hunter2" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dead", "show", "--id", "zz"], "'zz' is no record id: 32 hex digits"),
        (["dead", "replay", "--stage", "kafka"], "invalid choice: 'kafka'"),
        (["dead", "show", "--limit", "0"], "0 is not at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["dead", "list"]])
def test_without_kafka_they_say_what_is_missing(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == 2
    assert "TOKENHAUL_KAFKA_BOOTSTRAP is not set" in capsys.readouterr().err
