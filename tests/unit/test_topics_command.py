"""`tokenhaul topics create`: what it refuses before it connects. With Kafka: tests/integration/test_topics.py."""

from __future__ import annotations

import pytest

from services.cli import main


@pytest.mark.parametrize(
    ("dataset", "model", "message"),
    [
        ("", "m", "dataset '' cannot be a directory"),
        ("_d", "m", "dataset '_d' cannot be a directory"),
        ("a/b", "m", "dataset 'a/b' cannot be a directory"),
        ("d", " ", "the model has no label"),
    ],
)
def test_a_name_that_no_sink_could_use_is_not_frozen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dataset: str, model: str, message: str
) -> None:
    monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    monkeypatch.setattr("services.kernel.topics.create", lambda *_: pytest.fail("topics were made"))
    assert main(["topics", "create", f"--dataset={dataset}", f"--model={model}", "--partitions=2"]) == 2
    assert message in capsys.readouterr().err
