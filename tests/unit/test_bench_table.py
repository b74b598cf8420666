from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.table import Line, median_line, paired, read, show, write


@pytest.mark.parametrize(
    ("line", "passed"),
    [
        (Line(name="n", value=2.0, unit="s"), None),
        (Line(name="n", value=2.0, unit="s", at_most=2.0), True),
        (Line(name="n", value=2.1, unit="s", at_most=2.0), False),
        (Line(name="n", value=8.0, unit="/s", at_least=9.0, reference=10.0), False),
        (Line(name="n", value=8.0, unit="/s", at_least=0.8, reference=10.0, bounds="ratio"), True),
        (Line(name="n", value=7.9, unit="/s", at_least=0.8, reference=10.0, bounds="ratio"), False),
    ],
)
def test_a_budget_holds_for_the_value_or_for_the_ratio(line: Line, passed: bool | None) -> None:
    assert line.passed is passed


def test_a_budget_of_a_ratio_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="without a reference"):
        assert Line(name="n", value=1.0, unit="s", at_least=1.0, bounds="ratio").passed


def test_a_slow_spell_of_the_machine_does_not_change_the_ratio() -> None:
    seconds = iter([9.0, 9.0, 1.0, 2.0, 20.0, 10.0, 1.0, 2.0])  # the first pair is not counted
    ours, references = paired(lambda: next(seconds), lambda: next(seconds), 3)
    assert median_line(ours, references, name="n", unit="s").ratio == 0.5


def test_lines_are_printed_with_what_changed_and_come_back_from_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = Line(name="rows", value=8.0, unit="/s", reference=10.0, reference_name="bare", at_least=9.0)
    write([line], {"cores": "2"}, tmp_path / "out" / "bench.json")
    before = read(tmp_path / "out" / "bench.json")
    assert before == [line]
    show([Line(name="rows", value=10.0, unit="/s", reference=10.0)], "all", before)
    assert "+25%" in capsys.readouterr().out
