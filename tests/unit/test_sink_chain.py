"""A long chain is read by several threads, and is as if it had been read by one."""

from __future__ import annotations

from typing import BinaryIO

import pytest

from services.kernel.errors import Retry
from services.kernel.seen import pack
from services.sink.buffer import Buffer
from services.sink.chain import Chain, claim, shard_name
from tests.support.outcomes import DATASET, MemoryStore, fill, make_sequence, numbers_in

NUMBERS = numbers_in(0, 60)


class FailingStore(MemoryStore):
    """Does not answer when `failing` is asked for."""

    failing = ""

    def open(self, key: str) -> BinaryIO:
        if self.failing and key.endswith(self.failing):
            raise Retry("store", "no answer")
        return super().open(key)


def test_what_was_read_before_a_failure_is_kept_and_the_rest_follows() -> None:
    store = FailingStore()
    claim(store, DATASET)
    writer = Chain(store, DATASET, 0, "writer")
    for number in NUMBERS:
        assert writer.commit(fill(Buffer(writer.tail, writer.last_id), writer, [make_sequence(number)]))
    ids = pack([make_sequence(number).prompt.id for number in NUMBERS])
    reader = Chain(store, DATASET, 0, "reader")
    store.failing = shard_name(45)
    with pytest.raises(Retry):
        reader.refresh()
    assert (reader.tail, reader.last_id) == (45, make_sequence(NUMBERS[44]).prompt.id)
    assert reader.seen.rows.contains(ids).tolist() == [True] * 45 + [False] * 15
    store.failing = ""
    reader.refresh()
    assert (reader.tail, reader.last_id, reader.outcomes) == (writer.tail, writer.last_id, writer.outcomes)
    assert reader.seen.rows.contains(ids).all()
