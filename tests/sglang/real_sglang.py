"""500 prompts through the whole pipeline and a real SGLang; run by `make test-sglang`, which starts the server."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

from services.local.run import LOCAL_TOKENIZER
from services.sink.verify import verify
from tests.e2e.test_run import prompts
from tests.support.processes import tokenhaul

URL = os.environ["SGLANG_TEST_URL"]
LOG = Path(os.environ["SGLANG_TEST_LOG"])
COUNT = 500
_FINISHED = re.compile(
    r"Finish: obj=GenerateReqInput\(rid='([^']*)'.*? input_ids=\[([\d, ]*)\].*'output_ids': \[([\d, ]*)\]"
)


def numbers(text: str) -> list[int]:
    """A logged list of ids."""
    return [int(word) for word in text.split(", ")] if text else []


def logged() -> dict[str, tuple[list[int], list[int]]]:
    """What the server wrote: {rid: (input_ids, output_ids)}."""
    found = {}
    for line in LOG.read_text(errors="replace").splitlines():
        if match := _FINISHED.search(line):
            found[match[1]] = (numbers(match[2]), numbers(match[3]))
    return found


def test_every_row_is_what_the_server_logged(tmp_path: Path, broker: str) -> None:
    run = tokenhaul(
        "run", prompts(tmp_path, COUNT), "--max-new-tokens", 24, "--engine", URL, "--tokenizer", LOCAL_TOKENIZER,
        "--model", "smollm2-135m", "--kafka", broker, "--out", tmp_path / "out",
    )  # fmt: skip
    output, _ = run.communicate(timeout=3000)
    assert run.returncode == 0, output
    print(output)
    report = verify(tmp_path / "out", LOCAL_TOKENIZER)
    assert (report.ok, report.rows) == (True, COUNT), report.text()
    engine = logged()
    rows: list[dict[str, Any]] = ds.dataset(tmp_path / "out" / "out", format="parquet").to_table().to_pylist()
    for row in rows:
        asked, answered = engine[row["rids"][-1]]
        assert row["input_ids"] == asked + answered
        assert row["prompt_length"] == len(asked)
    assert len([rid for row in rows for rid in row["rids"]]) == COUNT, "no request was made twice"
