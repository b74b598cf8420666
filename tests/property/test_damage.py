"""Bits flip anywhere in a shard: verify names the file or nothing of it was lost, and a sink trips over no damage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kernel.errors import Fatal
from services.kernel.store import LocalStore
from services.sink.chain import Chain
from services.sink.verify import verify
from tests.support.outcomes import DATASET, make_failure, make_sequence, numbers_in, write_dataset

NUMBERS = numbers_in(0, 6)


@pytest.fixture(scope="module")
def shard() -> Iterator[Path]:
    """The only shard of a dataset."""
    with tempfile.TemporaryDirectory() as root:
        rows = [make_sequence(number, logprobs=[0.0, 0.5, 1.0]) for number in NUMBERS[1:]]
        dataset = write_dataset(Path(root), [[make_failure(NUMBERS[0]), *rows]])
        yield next(dataset.rglob("*.parquet"))


# The file's own footer is a fifth of it, and no checksum guards it: half of the flips go there.
@settings(max_examples=400)
@given(
    places=st.lists(st.floats(0, 1, exclude_max=True) | st.floats(0.75, 1, exclude_max=True), min_size=1, max_size=4),
    bits=st.integers(0, 7),
)
def test_damage_is_named_or_harmless(shard: Path, places: list[float], bits: int) -> None:
    whole, table = shard.read_bytes(), pq.read_table(shard)
    damaged = bytearray(whole)
    for place in places:
        damaged[int(place * len(whole))] ^= 1 << bits
    shard.write_bytes(damaged)
    try:
        report = verify(shard.parent.parent)
        assert all(problem.file.endswith(shard.name) for problem in report.problems)
        if report.ok:
            assert pq.read_table(shard).equals(table)
        chain = Chain(LocalStore(shard.parent.parent.parent), DATASET, 0, "writer")
        with suppress(Fatal):
            chain.refresh()
    finally:
        shard.write_bytes(whole)
