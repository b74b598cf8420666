"""How far each file has been published, as it stands on the cursors topic. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from schemas.control import SourceTotals
from schemas.cursors import Cursor
from services.ingest.lines import Mark
from services.kernel.errors import Fatal


def key(source: str, file: str) -> bytes:
    """The key of a file's cursor."""
    return f"{source}\0{file}".encode()


def resume(
    stored: Cursor | None, source: str, file: str, revision: int, settings: bytes, selection: bytes = b"", used: int = 0
) -> Cursor:
    """Where to go on in a file. Raises Fatal when the source asks otherwise than it did, with the same revision.
    `used`: the highest revision that commands asked anything with.

    Another sample of the same records is no other request: the file is read again for those that were left out."""
    begin = Cursor(
        source=source,
        file=file,
        revision=revision,
        offset=0,
        row=0,
        head=b"",
        head_bytes=0,
        settings=settings,
        published=stored.published if stored else 0,
        repeated=stored.repeated if stored else 0,
        refused=stored.refused if stored else {},
        selection=selection,
    )
    if stored is None or revision > stored.revision:
        return begin
    if revision < stored.revision:
        raise Fatal(
            f"source {source!r} has revision {revision}, but {file} was read with revision {stored.revision}: "
            f"revisions only rise, set it to {stored.revision} or more"
        )
    if settings != stored.settings:
        raise Fatal(
            f"source {source!r} asks otherwise than when {file} was read (max_new_tokens, other sampling, samples, "
            f"template or format differ): raise its revision to {max(revision, used) + 1} to ask everything "
            "anew, or restore what it asked. FILEs on a command line have no revision: "
            "take another --out (`tokenhaul run`), or declare them "
            "in a .yaml that says it"
        )
    return stored if selection == stored.selection else begin


def mark_of(cursor: Cursor) -> Mark:
    """Where to read on."""
    return Mark(**{name: getattr(cursor, name) for name in Mark.__struct_fields__})


def advance(cursor: Cursor, mark: Mark, published: int, repeated: int, refused: Mapping[str, int]) -> Cursor:
    """The cursor after a batch that ends at `mark`. Counts are of all that was ever done with the file."""
    return msgspec.structs.replace(
        cursor,
        **msgspec.structs.asdict(mark),
        published=cursor.published + published,
        repeated=cursor.repeated + repeated,
        refused=added(cursor.refused, refused),
    )


def totals(cursors: Iterable[Cursor], names: Iterable[str]) -> dict[str, SourceTotals]:
    """What was done with each source, over all its files."""
    sums = {name: SourceTotals() for name in names}
    for cursor in cursors:
        if sum_ := sums.get(cursor.source):
            sums[cursor.source] = SourceTotals(
                published=sum_.published + cursor.published,
                repeated=sum_.repeated + cursor.repeated,
                refused=added(sum_.refused, cursor.refused),
            )
    return sums


def added(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """The sum of two counts by reason."""
    return {reason: counts.get(reason, 0) + more.get(reason, 0) for reason in {**counts, **more}}
