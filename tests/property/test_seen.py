"""The id index behaves as a set of ids, at a fixed cost per id."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.kernel.seen import SeenIds, pack

# Few distinct high halves and the all-zero id: collisions and the marker of empty slots.
record_ids = st.builds(
    lambda high, low: high.to_bytes(8, "big") + low.to_bytes(8, "big"),
    st.sampled_from([0, 1, 1023, 1024, 2**64 - 1]),
    st.sampled_from([0, 1, 2, 3, 2**64 - 1]),
) | st.binary(min_size=16, max_size=16)


@given(batches=st.lists(st.lists(record_ids, max_size=40), max_size=12))
def test_like_a_set(batches: list[list[bytes]]) -> None:
    seen, reference = SeenIds(), set[bytes]()
    for batch in batches:
        assert seen.contains(pack(batch)).tolist() == [id in reference for id in batch]
        seen.add(pack(batch))
        reference |= set(batch)
        assert len(seen) == len(reference)
        assert all(id in seen for id in reference)


def test_it_grows_and_keeps_everything_within_24_bytes_an_id() -> None:
    ids = np.random.default_rng(5).integers(0, 2**64, (60_000, 2), dtype=np.uint64)
    seen = SeenIds()
    for start in range(0, len(ids), 777):
        seen.add(ids[start : start + 777])
        if start > 10_000:
            assert seen.nbytes / len(seen) <= 24
    assert seen.contains(ids).all()
    assert not seen.contains(ids[:, ::-1]).any()
