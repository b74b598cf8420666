"""The window against a simulated engine: full, not crowded, found again when its capacity changes, and shared."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generator.window import Load, Window

SAMPLE_SECONDS = 0.5


def simulate(
    windows: Sequence[Window], capacity: Callable[[float], int], median: float, sigma: float, until: float, seed: int
) -> tuple[float, float]:
    """(share of the engine's places in use, requests waiting per place in use), from the 10th second on.

    Every generator keeps as many requests in flight as its window allows: the backlog is endless. Service times are
    log-normal."""
    rng = random.Random(seed)
    in_flight = [0] * len(windows)
    queue: list[int] = []
    running: list[tuple[float, int]] = []
    looks = [rng.random() * SAMPLE_SECONDS for _ in windows]
    now = busy = places = waited = 0.0
    while now < until:
        for owner in rng.sample(range(len(windows)), len(windows)):
            new = max(0, windows[owner].limit - in_flight[owner])
            in_flight[owner] += new
            queue += [owner] * new
        while queue and len(running) < capacity(now):
            heapq.heappush(running, (now + rng.lognormvariate(math.log(median), sigma), queue.pop(0)))
        then = min(running[0][0], *looks)
        if now > 10:
            busy += min(len(running), capacity(now)) * (then - now)
            places += capacity(now) * (then - now)
            waited += len(queue) * (then - now)
        now = then
        if running[0][0] <= now:
            in_flight[heapq.heappop(running)[1]] -= 1
        for owner, due in enumerate(looks):
            if due <= now:
                looks[owner] = now + SAMPLE_SECONDS * rng.uniform(0.8, 1.2)
                load = Load(len(running), len(queue), 0.5, 0)
                windows[owner].update(now, load, in_flight[owner])
    return busy / places, waited / busy


class Fixed(Window):
    """What a setting makes of it: nobody looks at the load."""

    def update(self, now: float, load: Load, in_flight: int) -> None:
        pass


def window(seed: int = 0) -> Window:
    return Window(16, 2048, random.Random(seed).uniform)


@pytest.mark.parametrize("generators", [1, 3])
@pytest.mark.parametrize("capacity", [8, 64, 256])
@pytest.mark.parametrize(("median", "sigma"), [(0.4, 1.2), (2.0, 1.16)])
def test_an_engine_of_unknown_capacity_is_kept_full_and_its_queue_short(
    generators: int, capacity: int, median: float, sigma: float
) -> None:
    occupied, waiting = simulate(
        [window(seed) for seed in range(generators)], lambda _: capacity, median, sigma, 120, seed=1
    )
    assert occupied >= 0.98
    assert waiting * capacity <= max(0.1 * capacity, generators)


def test_who_comes_late_gets_a_share_of_a_full_engine() -> None:
    early, late = Window(270, 2048, random.Random(1).uniform), Window(1, 2048, random.Random(2).uniform)
    occupied, _ = simulate([early, late], lambda _: 256, 2.0, 1.16, 300, seed=1)
    assert occupied >= 0.98
    assert late.limit >= early.limit / 3


@pytest.mark.parametrize("generators", [1, 3])
def test_it_follows_a_capacity_that_is_halved_and_doubled_where_a_fixed_one_does_not(generators: int) -> None:
    def capacity(now: float) -> int:
        return 64 if now < 60 else 32 if now < 120 else 128

    windows = [window(seed) for seed in range(generators)]
    occupied, waiting = simulate(windows, capacity, 0.4, 1.2, 180, seed=2)
    assert occupied >= 0.95
    assert waiting <= 0.1
    for size in (32, 64, 128):
        fixed = [Fixed(size // generators, size // generators) for _ in range(generators)]
        occupied, waiting = simulate(fixed, capacity, 0.4, 1.2, 180, seed=2)
        assert occupied < 0.95 or waiting > 0.1, f"a fixed window of {size} would do as well"


def test_nobody_who_shares_an_engine_is_starved() -> None:
    windows = [window(seed) for seed in range(3)]
    simulate(windows, lambda _: 64, 0.4, 1.2, 120, seed=3)
    assert min(w.limit for w in windows) >= 64 / 3 / 3


def test_retractions_and_a_full_cache_hold_it_back() -> None:
    held = window()
    for second in range(20):
        held.update(second, Load(40, 0, 0.96, 0), in_flight=held.limit)
    assert held.limit == 16, "no growth into a full cache"
    held.update(21, Load(16, 0, 0.9, 3), in_flight=16)
    assert held.limit == 13
    for second in range(22, 27):
        held.update(second, Load(13, 0, 0.5, 0), in_flight=held.limit)
    assert held.limit == 13, "a retraction is remembered for a while"
    for second in range(40, 60):
        held.update(second, Load(held.limit, 0, 0.5, 0), in_flight=held.limit)
    assert held.limit > 13


def test_behind_a_router_it_grows_by_one_and_shrinks_when_refused() -> None:
    blind = Window(64, 2048, lambda low, high: (low + high) / 2)
    for second in range(10):
        blind.unseen(second, blind.limit)
    assert blind.limit == 74
    blind.refused(10, 74)
    blind.refused(10.1, 74)  # those in flight with it were refused together: one step down
    assert blind.limit == 59


samples = st.builds(
    Load, st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 1), st.sampled_from([0, 0, 0, 1, 50])
)


@given(steps=st.lists(st.tuples(samples, st.integers(0, 3000)), max_size=60), most=st.integers(1, 3000))
def test_it_stays_within_its_bounds_whatever_an_engine_says(steps: list[tuple[Load, int]], most: int) -> None:
    bounded = Window(16, most, random.Random(0).uniform)
    for second, (load, in_flight) in enumerate(steps):
        bounded.update(second / 2, load, in_flight)
        assert 1 <= bounded.limit <= most
