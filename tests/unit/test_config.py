"""`tokenhaul config`: nothing hidden but secrets, and wrong values named."""

from __future__ import annotations

import json

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
