"""The tracker under random completion orders, crashes and rebalances (also A -> B -> A with A suspended)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kernel.watermark import METADATA_BYTES, Tracker

# Offsets with holes, as transaction markers and aborted records leave them; a few very wide.
logs = st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 200, 20_000]), min_size=1, max_size=80).map(
    lambda gaps: [sum(gaps[: i + 1]) for i in range(len(gaps))]
)


class Owner:
    """A member working on one partition the way the generator does; `known` is what a correct one knows to be done."""

    def __init__(self, log: list[int], committed: tuple[int, str], known: set[int]) -> None:
        self.log = log
        self.tracker = Tracker.restore(*committed)
        self.position = self.tracker.watermark
        self.running: set[int] = set()
        self.known = set(known)

    def poll(self, most: int) -> list[int]:
        """Take in up to `most` records; the offsets whose generation starts now."""
        batch = [offset for offset in self.log if offset >= self.position][:most]
        taken, rewind = self.tracker.take(batch)
        self.position = rewind if rewind is not None else (batch[-1] + 1 if batch else self.log[-1] + 2)
        self.tracker.passed(self.position)
        assert not self.running & set(taken), "started twice at once"
        self.running |= set(taken)
        return taken

    def finish(self, offset: int) -> None:
        self.running.discard(offset)
        self.known.add(offset)
        self.tracker.done(offset)

    def reassigned(self, committed: tuple[int, str], known: set[int]) -> None:
        """The partition came back to this member: merge, seek to the watermark."""
        self.tracker.merge(Tracker.restore(*committed))
        self.position = self.tracker.watermark
        self.known |= known


@settings(max_examples=400, deadline=None)
@given(log=logs, seed=st.integers(0, 2**32))
def test_nothing_is_lost_and_nothing_known_to_be_done_is_started_again(log: list[int], seed: int) -> None:
    rng = random.Random(seed)
    committed: tuple[int, str] = (0, "")
    known: set[int] = set()  # what the last commit tells
    done: set[int] = set()
    owners = [Owner(log, committed, known)]
    for _ in range(20 * len(log)):
        owner, move = owners[0], rng.random()
        if move < 0.4:
            assert not owner.known & set(owner.poll(rng.randint(1, 8))), "paid for twice"
        elif move < 0.8 and owner.running:
            offset = rng.choice(sorted(owner.running))
            owner.finish(offset)
            done.add(offset)
        elif move < 0.9:
            committed, known = (owner.tracker.watermark, owner.tracker.metadata()), set(owner.known)
            assert len(committed[1]) <= METADATA_BYTES
            assert done >= {offset for offset in log if offset < committed[0]}, "the watermark passed an open offset"
        elif move < 0.93:  # kill -9
            owners[0] = Owner(log, committed, known)
        elif move < 0.97:  # to another member; this one is suspended and keeps its tracker
            owners.insert(0, Owner(log, committed, known))
        elif len(owners) > 1:  # and back to one that had it before
            owners.insert(0, owners.pop(rng.randrange(1, len(owners))))
            owners[0].reassigned(committed, known)
    last = Owner(log, committed, known)
    while last.tracker.watermark <= log[-1]:
        assert not known & set(last.poll(100)), "paid for twice"
        for offset in sorted(last.running):
            last.finish(offset)
            done.add(offset)
    assert done == set(log), "lost"


@given(log=logs, seed=st.integers(0, 2**32))
def test_a_restored_tracker_takes_exactly_what_was_open(log: list[int], seed: int) -> None:
    rng = random.Random(seed)
    tracker = Tracker(0)
    taken, _ = tracker.take(log)
    done = set(rng.sample(taken, rng.randint(0, len(taken))))
    for offset in done:
        tracker.done(offset)
    again = Tracker.restore(tracker.watermark, tracker.metadata())
    redelivered = [offset for offset in log if offset >= again.watermark]
    assert again.take(redelivered)[0] == [offset for offset in log if offset not in done]


def test_admission_stops_before_the_metadata_overflows_and_goes_on_after() -> None:
    tracker = Tracker(0)
    everything = range(0, 1_000_000, 1000)  # two bytes a gap
    taken, rewind = tracker.take(everything)
    more, rewind_more = tracker.take(range(1_000_000, 9_000_000, 1000))
    taken, rewind = [*taken, *more], rewind or rewind_more
    assert rewind is not None
    assert len(tracker.metadata()) <= METADATA_BYTES
    assert Tracker.restore(0, tracker.metadata()).take([rewind]) == ([], rewind), "a new owner has no more room"
    rng = random.Random(1)
    for offset in rng.sample(taken, len(taken) - 1):
        tracker.done(offset)
        assert len(tracker.metadata()) <= METADATA_BYTES
    assert tracker.take([rewind]) == ([rewind], None)


@pytest.mark.parametrize("metadata", ["2:AAAA", "1:", "1:gA==", "1:AgU=", "1:BQA=", "1:!!!!"])
def test_metadata_that_is_not_ours_is_refused(metadata: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any, with whatever text: the caller names the partition
        Tracker.restore(7, metadata)
