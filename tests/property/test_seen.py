"""The id index behaves as a set of ids, at a fixed cost per id."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kernel import seen as seen_module
from services.kernel.seen import SeenIds, pack

# Few distinct high halves: ids that stand side by side.
record_ids = st.builds(
    lambda high, low: high.to_bytes(8, "big") + low.to_bytes(8, "big"),
    st.sampled_from([0, 1, 1023, 1024, 2**64 - 1]),
    st.sampled_from([0, 1, 2, 3, 2**64 - 1]),
) | st.binary(min_size=16, max_size=16)


def behaves_as_a_set(batches: list[list[bytes]]) -> None:
    seen, reference = SeenIds(), set[bytes]()
    for batch in batches:
        assert seen.contains(pack(batch)).tolist() == [id in reference for id in batch]
        seen.add(pack(batch))
        reference |= set(batch)
        assert len(seen) == len(reference)
        assert all(id in seen for id in reference)


@given(batches=st.lists(st.lists(record_ids, max_size=40), max_size=12))
def test_like_a_set(batches: list[list[bytes]]) -> None:
    behaves_as_a_set(batches)


@given(
    batches=st.lists(st.lists(record_ids, max_size=40), max_size=12),
    chunk=st.integers(2, 20),
)
def test_also_when_it_is_in_many_chunks(batches: list[list[bytes]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_module, "_CHUNK", chunk)
        behaves_as_a_set(batches)


def test_it_grows_within_24_bytes_an_id_at_any_moment() -> None:
    ids = np.random.default_rng(5).integers(0, 2**64, (8_000_000, 2), dtype=np.uint64)
    seen = SeenIds()
    tracemalloc.start()
    try:
        for start in range(0, len(ids), 500_000):
            seen.add(ids[start : start + 500_000])
            assert seen.nbytes == 16 * len(seen)
        batch = 500_000 * 60  # what one batch takes while it is sorted
        assert tracemalloc.get_traced_memory()[1] - batch <= 24 * len(seen)
    finally:
        tracemalloc.stop()
    assert len(seen) == len(ids)
    assert seen.contains(ids[::97]).all()
    assert not seen.contains(ids[::97, ::-1]).any()
