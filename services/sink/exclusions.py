"""Rows that are not to be used any more: lists of record ids, each written once and never changed.

    <dataset>/_exclusions/20261130T103000-1f0c6e2b9a7d4c55.parquet      one column, `id`; why and by what in the footer

The rows stay in their shards, which nobody changes; whoever reads the dataset leaves them out.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from services.kernel.errors import Fatal
from services.kernel.seen import SeenIds
from services.kernel.store import Store
from services.sink.chain import join
from services.sink.parquet import FOOTER_KEY, damage_named, row_ids

FOLDER = "_exclusions"


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What one list says of itself. `where` is the condition its rows were found by, `reason` is for people."""

    name: str = ""
    reason: str
    where: str
    rows: int
    created_at: float


class Exclusions:
    """Some lists together. The index takes about 20 bytes an id."""

    def __init__(self) -> None:
        self.lists: list[Exclusion] = []
        self.ids = SeenIds()


def names(store: Store, folder: str) -> list[str]:
    """All lists there are for the dataset in `folder`, the oldest first."""
    return [name for name in store.list(join(folder, FOLDER)) if name.endswith(".parquet")]


def load(store: Store, folder: str, wanted: Sequence[str] | None = None) -> Exclusions:
    """The lists called `wanted`, or all. Raises Fatal for one that cannot be read, Retry when there is no answer."""
    exclusions = Exclusions()
    for name in names(store, folder) if wanted is None else wanted:
        key = join(folder, f"{FOLDER}/{name}")
        full = store.name(key)
        with store.open(key) as file, damage_named(full):
            listed = pq.ParquetFile(file, page_checksum_verification=True)
            text = (listed.metadata.metadata or {}).get(FOOTER_KEY.encode(), b"")
            try:
                exclusion = msgspec.json.decode(text, type=Exclusion)
                exclusions.ids.add(row_ids(listed))
            except ValueError as error:
                raise Fatal(f"{full} is no list of excluded rows: {error}") from error
        exclusions.lists.append(msgspec.structs.replace(exclusion, name=name))
    return exclusions


def write(store: Store, folder: str, ids: Sequence[str], exclusion: Exclusion) -> str:
    """Exclude the rows with `ids` (32 hex digits each); the name of the new list."""
    sink = io.BytesIO()
    column = pa.table({"id": pa.array(ids, pa.string())})
    with pq.ParquetWriter(
        sink, column.schema, compression="zstd", use_dictionary=False, write_page_checksum=True
    ) as writer:
        writer.write_table(column)
        writer.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(exclusion).decode()})
    data = sink.getvalue()
    made = datetime.fromtimestamp(exclusion.created_at, UTC)
    name = f"{made:%Y%m%dT%H%M%S}-{blake2b(data, digest_size=8).hexdigest()}.parquet"
    store.create(join(folder, f"{FOLDER}/{name}"), data)  # False: the very same list is there already
    return name
