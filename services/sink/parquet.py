"""A shard as bytes: a Parquet file whose footer says what part of the chain it is.

The footer is JSON in the file's key-value metadata under FOOTER_KEY.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from services.kernel.errors import Fatal
from services.kernel.seen import Ids, pack
from services.sink.rows import SCHEMA, Row, table

FOOTER_KEY = "tokenhaul"
VERSION = 1

TOKEN_COLUMNS = ("input_ids", "loss_mask")
# What repeats within a shard. Ids of tokens do not: a dictionary costs a third more than zstd alone.
_DICTIONARY = [
    "source",
    "finish_reason",
    "matched_stop",
    "model",
    "engine_version",
    "weight_version",
    "tokenizer_fingerprint",
    "chat_template_kwargs",
    "tools",
]
# What readers choose rows by.
_STATISTICS = ["prompt_length", "output_length", "revision", "created_at", "generated_at", "kafka_offset"]
_LEVEL = 6
_GROUP_TOKENS = 4 * 1024 * 1024


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard says of itself. Ids are hex.

    It covers the offsets [start, end): `end - start == rows + duplicates + len(failures) + gap`. `last_id` is the id of
    the record at end - 1, null only when that one was never seen (a gap). `superseded` are ids of rows of this shard
    that stand as failures in it or before it: readers count such an id as a row, not as a failure."""

    schema: int = VERSION
    dataset: str
    model: str
    partition: int
    partitions: int
    start: int
    end: int
    last_id: str | None
    rows: int
    duplicates: int
    failures: list[tuple[str, str]]
    superseded: list[str]
    gap: int
    writer: str
    attempt: str
    created_at: float


class DamagedShard(Fatal):
    """A file that stands where a shard must and is none, not whole, or of another version."""


def encode(rows: Sequence[Row], footer: Footer) -> memoryview:
    """The bytes of a shard."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        compression_level=_LEVEL,
        use_dictionary=_DICTIONARY,  # type: ignore[arg-type]  # the stubs know only bool
        write_statistics=_STATISTICS,
        write_page_checksum=True,
    ) as writer:
        if rows:  # datasets refuses a file with an empty row group, but takes one with none
            tokens = sum(len(row.input_ids) for row in rows)
            writer.write_table(table(rows), row_group_size=max(1, len(rows) * _GROUP_TOKENS // tokens))
        writer.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(footer).decode()})
    return memoryview(sink.getvalue()).cast("B")  # Arrow says "b", which obstore does not take for bytes


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """While a shard is read: what Arrow stumbles over is damage of `name`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # a name in the footer that is no text is a ValueError
        raise DamagedShard(f"{name} is torn or no Parquet file: {error}") from error


def open_shard(file: BinaryIO, name: str) -> tuple[pq.ParquetFile, Footer]:
    """The Parquet file (page checksums are verified when it is read) and its footer. Raises DamagedShard."""
    with damage_named(name):
        # Ranges that lie together are fetched together: on an object store every read is a request.
        shard = pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=True)
        text = (shard.metadata.metadata or {}).get(FOOTER_KEY.encode())
    if text is None:
        raise DamagedShard(f"{name} is a Parquet file, but no shard of tokenhaul")
    try:
        footer = msgspec.json.decode(text, type=Footer)
    except msgspec.DecodeError as error:
        raise DamagedShard(f"{name} has a footer that cannot be read: {error}") from error
    if footer.schema > VERSION:
        raise DamagedShard(f"{name} was written by a newer tokenhaul (schema {footer.schema}, known is {VERSION})")
    return shard, footer


def row_ids(shard: pq.ParquetFile) -> Ids:
    """The ids of all rows."""
    # All are 32 hex digits: together they are one text.
    return pack([bytes.fromhex("".join(map(str, shard.read(columns=["id"]).column("id").to_pylist())))])
