"""A cursor says where to go on, and refuses to go on with another request."""

from __future__ import annotations

import pytest

from schemas.control import SourceTotals
from schemas.cursors import Cursor
from services.ingest import cursor
from services.ingest.lines import Mark
from services.kernel.errors import Fatal

ASKED, OTHER = b"asked", b"other"


def read(file: str = "f", revision: int = 1) -> Cursor:
    begin = cursor.resume(None, "s", file, revision, ASKED)
    return cursor.advance(begin, Mark(100, 3, b"head", 100), 2, 1, {"not_json": 1})


def test_a_file_never_read_begins_at_its_start() -> None:
    assert cursor.mark_of(cursor.resume(None, "s", "f", 0, ASKED)) == Mark()


def test_a_file_is_read_on_where_it_was_left() -> None:
    stored = read()
    assert cursor.resume(stored, "s", "f", 1, ASKED) == stored
    assert cursor.mark_of(stored) == Mark(100, 3, b"head", 100)


def test_counts_add_up_over_batches() -> None:
    later = cursor.advance(read(), Mark(200, 9, b"head", 100), 4, 0, {"not_json": 1, "bad_field": 1})
    assert (later.published, later.repeated, later.refused) == (6, 1, {"not_json": 2, "bad_field": 1})


def test_another_request_of_the_same_revision_is_refused_with_what_to_do() -> None:
    with pytest.raises(Fatal) as caught:
        cursor.resume(read(revision=4), "s", "f", 4, OTHER)
    assert "source 's' asks otherwise than when f was read" in str(caught.value)
    assert "raise its revision to 5" in str(caught.value)


def test_a_higher_revision_reads_again_and_forgets_no_count() -> None:
    again = cursor.resume(read(revision=1), "s", "f", 2, OTHER)
    assert cursor.mark_of(again) == Mark()
    assert (again.revision, again.settings, again.published, again.repeated) == (2, OTHER, 2, 1)
    assert again.refused == {"not_json": 1}


def test_a_lower_revision_is_refused() -> None:
    with pytest.raises(Fatal, match="f was read with revision 2: revisions only rise, set it to 2 or more"):
        cursor.resume(read(revision=2), "s", "f", 1, ASKED)


def test_totals_are_sums_over_files_of_the_sources_there_are() -> None:
    old = cursor.advance(cursor.resume(None, "gone", "f", 0, ASKED), Mark(1, 1), 9, 9, {})
    totals = cursor.totals([read("a"), read("b"), old], ["s", "fresh"])
    assert totals == {"s": SourceTotals(published=4, repeated=2, refused={"not_json": 2}), "fresh": SourceTotals()}


def test_keys_of_files_differ_by_source() -> None:
    assert cursor.key("a", "b/f.jsonl") == b"a\0b/f.jsonl"
