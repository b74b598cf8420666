"""When a shard is closed, and how much may come in."""

from __future__ import annotations

from typing import Any

import pytest

from services.kernel.errors import SettingsError
from services.kernel.settings import load
from services.sink.arrivals import Arrival, Refusal
from services.sink.buffer import Buffer
from services.sink.rotation import Rotation
from services.sink.settings import SinkSettings

MIB = 1024 * 1024


def rotation(**settings: Any) -> Rotation:
    return Rotation(SinkSettings(root="unused", **settings))


def buffer(kept: int = 0, nbytes: int = 0, opened: float | None = None) -> Buffer:
    made = Buffer(0, None)
    made.rows = [None] * kept  # type: ignore[list-item]
    made.nbytes, made.opened = nbytes, opened
    return made


def arrival(nbytes: int) -> Arrival:
    return Arrival(0, b"", Refusal(None, b"", None), nbytes)  # type: ignore[arg-type]


def test_each_limit_closes_a_shard() -> None:
    limits = rotation(max_rows=10, max_bytes=MIB, max_age_seconds=60)
    buffers = {
        0: buffer(kept=9, nbytes=MIB - 1, opened=100.0),
        1: buffer(kept=10),
        2: buffer(nbytes=MIB),
        3: buffer(opened=99.0),
        4: buffer(),
    }
    assert limits.due(buffers, now=159.0) == [1, 2, 3]


def test_failures_count_like_rows() -> None:
    full = buffer(kept=9)
    full.failures = [(b"", None)]  # type: ignore[list-item]
    assert rotation(max_rows=10).due({0: full}, now=0.0) == [0]


def test_a_shard_of_duplicates_alone_is_closed_by_its_age() -> None:
    assert rotation(max_age_seconds=60).due({0: buffer(opened=1.0)}, now=61.0) == [0]


def test_the_largest_shards_make_room() -> None:
    limits = rotation(buffer_bytes=10 * MIB)
    limits.arrived([arrival(3 * MIB)])
    buffers = {0: buffer(nbytes=3 * MIB), 1: buffer(nbytes=5 * MIB), 2: buffer(nbytes=1 * MIB)}
    assert limits.room(buffers) == 0
    assert limits.due(buffers, now=0.0) == [1]
    del buffers[1]
    assert limits.room(buffers) == 2
    assert limits.due(buffers, now=0.0) == []


def test_a_shard_that_is_due_makes_room_too() -> None:
    limits = rotation(buffer_bytes=10 * MIB, max_rows=5)
    limits.arrived([arrival(4 * MIB)])
    buffers = {0: buffer(kept=5, nbytes=4 * MIB), 1: buffer(nbytes=4 * MIB)}
    assert limits.due(buffers, now=0.0) == [0]


def test_a_record_larger_than_the_budget_passes_alone() -> None:
    limits = rotation(buffer_bytes=MIB)
    limits.arrived([arrival(5 * MIB)])
    assert limits.room({0: buffer()}) == 1
    assert limits.due({0: buffer(nbytes=5 * MIB)}, now=0.0) == [0]


def test_one_huge_record_makes_polls_small_for_a_while_only() -> None:
    limits = rotation(buffer_bytes=512 * MIB)
    limits.arrived([arrival(40 * MIB)])
    assert limits.room({}) == 12
    for _ in range(100):
        limits.arrived([arrival(1024)] * limits.room({}))
    assert limits.room({}) == 500
    limits.arrived([arrival(40 * MIB)])
    assert limits.room({}) == 12


def test_a_poll_is_no_larger_than_a_shard() -> None:
    assert rotation(max_rows=16).room({}) == 16
    assert rotation().room({}) == 500


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TOKENHAUL_SINK_MAX_ROWS", "0"),
        ("TOKENHAUL_SINK_MAX_BYTES", str(2**31)),
        ("TOKENHAUL_SINK_MAX_AGE_SECONDS", "0"),
        ("TOKENHAUL_SINK_BUFFER_BYTES", "many"),
        ("TOKENHAUL_SINK_ON_GAP", "ignore"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{variable}='{value}' is not allowed"):
        load(SinkSettings, {"TOKENHAUL_SINK_ROOT": "out", variable: value})


def test_the_root_is_required() -> None:
    with pytest.raises(SettingsError, match="TOKENHAUL_SINK_ROOT is not set"):
        load(SinkSettings, {})
