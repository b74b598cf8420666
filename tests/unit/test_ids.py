"""Record ids are pinned: a changed id would make every record of every dataset a new one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schemas import ids

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "ids.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden(case: dict[str, object]) -> None:
    asked = case["asked"]
    assert isinstance(asked, dict)
    record = ids.record_id(**asked)
    assert record.hex() == case["record_id"]
    assert ids.request_id(asked["prompt_ids"], asked["model"], asked["sample_index"]).hex() == case["request_id"]
    assert ids.prompt_id(asked["prompt_ids"]).hex() == case["prompt_id"]
    assert (ids.seed(record), ids.partition(record, 12)) == (case["seed"], case["partition_of_12"])


def test_the_same_request_has_the_same_id_however_it_is_written() -> None:
    one = ids.record_id([1, 2], "m", {"temperature": 1, "top_p": 0.5, "stop": None, "stop_token_ids": [2]}, 0, 0)
    other = ids.record_id((1, 2), "m", {"stop_token_ids": (2,), "top_p": 0.5, "temperature": 1.0}, 0, 0)
    assert one == other


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_ids": [1, 3]},
        {"model": "n"},
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"temperature": 1.0, "ignore_eos": True}},
        {"sample_index": 1},
        {"revision": 1},
    ],
)
def test_another_request_has_another_id(changed: dict[str, object]) -> None:
    asked: dict[str, object] = {
        "prompt_ids": [1, 2], "model": "m", "sampling": {"temperature": 1.0}, "sample_index": 0, "revision": 0,
    }  # fmt: skip
    assert ids.record_id(**asked) != ids.record_id(**asked | changed)  # type: ignore[arg-type]


def test_true_and_one_are_different_answers_to_a_setting() -> None:
    assert ids.record_id([1], "m", {"x": True}, 0, 0) != ids.record_id([1], "m", {"x": 1}, 0, 0)
