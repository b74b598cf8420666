"""A batch that was spoilt is discarded and asked for again, from the command line to the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from services.cli import main
from services.dataset import place
from services.dataset.reader import View
from services.local.pipeline import Plan
from services.local.run import LOCAL_TOKENIZER
from services.sink.verify import verify
from tests.e2e.test_run import prompts
from tests.support.processes import fake_engine, tokenhaul

pytestmark = pytest.mark.long

COUNT = 30


def rows(
    dataset: Path, column: str = "finish_reason", source: str = "spoilt", *, discarded: bool = False
) -> list[object]:
    """A column of one source, as readers see it."""
    view = View(place.find(str(dataset)))
    tables = [table.to_pylist() for table in view.rows(["source", column], discarded=discarded)]
    return [row[column] for table in tables for row in table if row["source"] == source]


@pytest.mark.timeout(300)
def test_a_spoilt_batch_is_discarded_and_regenerated(
    tmp_path: Path, broker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tool(*arguments: object) -> str:
        """A tool's output; it must succeed."""
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert status == 0, shown.out + shown.err
        return shown.out

    for source in ("good", "spoilt"):
        (tmp_path / source).mkdir()
        lines = [json.loads(line) for line in prompts(tmp_path / source, COUNT).read_text().splitlines()]
        for line in lines:
            line["messages"][0]["content"] += f" [{source}]"
        (tmp_path / source / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    declared = [
        {"name": "good", "files": ["good/prompts.jsonl"], "max_new_tokens": 64},
        {"name": "spoilt", "files": ["spoilt/prompts.jsonl"], "max_new_tokens": 5},  # somebody forgot a digit
    ]
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump({"sources": declared}))
    out = tmp_path / "out"

    with fake_engine(tmp_path) as (url, _):
        run = [
            "run", tmp_path / "sources.yaml", "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
            "--kafka", broker, "--out", out,
        ]  # fmt: skip
        output, _ = (process := tokenhaul(*run)).communicate(timeout=140)
        assert process.returncode == 0, output
        assert rows(out) == ["length"] * COUNT

        dataset = ["--dataset", out]
        tool("snapshot", "spoilt", *dataset)
        condition = ["--where", "source = spoilt and finish_reason = length"]
        assert f"{COUNT} rows are discarded" in tool("discard", *condition, "--reason", "limit of 5", *dataset)
        assert rows(out) == []
        monkeypatch.setenv("TOKENHAUL_KAFKA_BOOTSTRAP", broker)
        monkeypatch.setenv("TOKENHAUL_KAFKA_PREFIX", prefix(out))
        again = ["regenerate", *condition, "--max-new-tokens", 64, *dataset]
        assert "nothing is asked again" in tool(*again), "discarded rows are not among the others"
        assert f"{COUNT} rows are asked again as revision 1" in tool(*again, "--discarded")

        for name in ("BOOTSTRAP", "PREFIX"):
            monkeypatch.delenv(f"TOKENHAUL_KAFKA_{name}")
        output, _ = (process := tokenhaul(*run)).communicate(timeout=140)
        assert process.returncode == 0, output

    assert rows(out) == ["stop"] * COUNT
    assert rows(out, "revision") == [1] * COUNT
    assert rows(out, "revision", source="good") == [0] * COUNT
    report = verify(out, LOCAL_TOKENIZER)
    assert report.ok, report.text()
    assert (report.rows, report.discarded, report.failures) == (3 * COUNT, COUNT, {})
    tool("export", "specforge", "--max-length", 4096, "--out", tmp_path / "export", *dataset)
    exported = [json.loads(line) for line in (tmp_path / "export/train-00000-of-00001.jsonl").read_text().splitlines()]
    assert len(exported) == 2 * COUNT
    assert {row["finish_reason"] for row in exported} == {"stop"}
    assert not rows(out, discarded=True), "the new rows stand in their place"


def prefix(out: Path) -> str:
    """Of the topics of a run into `out`."""
    plan = Plan(out=out, dataset=out.name, model="", tokenizer=out, engines=[], kafka=None, partitions=1, sources=out)
    return plan.prefix
