"""Bits flip anywhere in a shard: verify names the file, and a sink trips over none of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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


# The metadata is a quarter of this file: half of the flips go there.
@settings(max_examples=300)
@given(place=st.floats(0, 1, exclude_max=True) | st.floats(0.75, 1, exclude_max=True), bit=st.integers(0, 7))
def test_damage_is_named(shard: Path, place: float, bit: int) -> None:
    whole = shard.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(whole))] ^= 1 << bit
    shard.write_bytes(damaged)
    try:
        problems = verify(shard.parent.parent).problems
        assert problems
        assert all(problem.file.endswith(shard.name) for problem in problems)
        chain = Chain(LocalStore(shard.parent.parent.parent), DATASET, 0, "writer")
        with suppress(Fatal):
            chain.refresh()
    finally:
        shard.write_bytes(whole)
