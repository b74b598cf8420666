from __future__ import annotations

import msgspec

from tests.bench.simulation import Case, simulate

CASE = Case(generators=3, engines=2, places=32, partitions=12, median=0.4, sigma=1.2, seconds=40)


def test_engines_are_full_and_nothing_is_asked_twice_while_nobody_dies() -> None:
    result = simulate(CASE)
    assert result.in_use >= 0.98
    assert result.again == 0
    assert result.lost_share == 0


def test_a_kill_costs_what_was_in_flight_and_moving_costs_more() -> None:
    static = simulate(msgspec.structs.replace(CASE, kills=(20.0,), session_seconds=30, restart_seconds=3))
    moved = simulate(msgspec.structs.replace(CASE, kills=(20.0,), session_seconds=3, restart_seconds=10))
    assert 0 < static.lost_share < moved.lost_share
    assert 0 < static.again <= 2 * CASE.engines * CASE.places
    assert static.in_use >= 0.9


def test_scaling_moves_partitions_and_loses_what_is_in_flight_on_them() -> None:
    result = simulate(msgspec.structs.replace(CASE, generators=1, scale=((20.0, 3),)))
    assert result.again > 0
    assert result.in_use >= 0.95
