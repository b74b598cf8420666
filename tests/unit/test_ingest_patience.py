"""A source that is not what it was declared to be stops, and says of what kind its refusals are."""

from __future__ import annotations

from collections import Counter

import pytest

from services.ingest.lines import Line
from services.ingest.patience import WINDOW, Patience
from services.ingest.prompts import Letter, Made
from services.ingest.sources import Source


def after(patience: Patience, *good: bool) -> str:
    lines = [Line(row, b"x") for row in range(len(good))]
    letters = [Letter(b"", b"", row, "not_json", "") for row, well in enumerate(good) if not well]
    return patience.after(lines, Made([], letters, Counter(letter.reason for letter in letters)))


def source(**keys: float) -> Source:
    return Source(name="s", files=["f.jsonl"], max_new_tokens=1, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bad", "stops"), [(9, False), (10, True)])
def test_too_many_in_a_row(bad: int, stops: bool) -> None:
    patience = Patience(source(max_bad_in_a_row=10))
    assert not after(patience, *[False] * 5, True, *[False] * (bad - 3))
    why = after(patience, *[False] * 3, True)
    assert bool(why) == stops
    assert (
        not stops
        or why == "10 records in a row were refused (max_bad_in_a_row: 10); most often, in the last batch: not_json"
    )


def test_too_large_a_share_of_the_last_ones() -> None:
    patience = Patience(source(max_bad_ratio=0.5))
    assert not after(patience, *[True, False] * (WINDOW // 2))
    assert "51% of the last 1000 records were refused (max_bad_ratio: 0.5)" in after(patience, *[False] * 20)


def test_few_records_are_too_few_to_judge_by_their_share() -> None:
    assert not after(Patience(source(max_bad_ratio=0.1)), *[False] * (WINDOW - 1))
