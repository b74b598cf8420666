from __future__ import annotations

import msgspec

from tests.bench.scaling import COSTS, GPUS, PAGE, dataset, filled, fleet


def test_the_page_shows_what_the_arithmetic_gives() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "run python -m tests.bench.scaling"


def test_what_is_needed_grows_with_the_fleet_and_with_the_costs() -> None:
    fleets = [fleet(gpus) for gpus in GPUS]
    assert [each.generators for each in fleets] == sorted(each.generators for each in fleets)
    dear = fleet(GPUS[-1], msgspec.structs.replace(COSTS, generator_record=COSTS.generator_record * 100))
    assert dear.generators > fleets[-1].generators
    assert all(each.partitions >= 4 * each.generators for each in fleets if each.generators > 3)


def test_twice_the_prompts_take_twice_the_time_and_twice_the_ids() -> None:
    one, two = dataset(10_000_000, 64), dataset(20_000_000, 64)
    assert (two.days, two.ingest_ids, two.prompts_topic) == (2 * one.days, 2 * one.ingest_ids, 2 * one.prompts_topic)
