"""A shard as bytes: a Parquet file whose footer says what part of the chain it is.

The footer is JSON in the file's key-value metadata under FOOTER_KEY. Before the metadata, where no Parquet reader
looks, stands a seal: digests of all bytes before it and of all bytes after it. Parquet has checksums of pages only; of
damaged metadata Arrow makes other rows, or ends the process.

    PAR1 | pages | seal: mark, digest of what is before, digest of what is behind | metadata | its length | PAR1
"""

from __future__ import annotations

import io
from binascii import unhexlify
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.kernel.errors import Fatal
from services.kernel.seen import Ids, unpack
from services.kernel.store import Data
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
WRITING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 6,
    "use_dictionary": _DICTIONARY,
    "write_statistics": _STATISTICS,
    "write_page_checksum": True,
}
"""How columns become pages."""

_GROUP_TOKENS = 4 * 1024 * 1024

_ID_DIGITS = 32
_MARK = b"\x00tokenhaul\xff\x00\xfe\x01seal"
_DIGEST_BYTES = 16
_SEAL_BYTES = len(_MARK) + 2 * _DIGEST_BYTES
_ENDING_BYTES = 8  # of a Parquet file: the length of the metadata, PAR1
_TAIL_BYTES = 64 * 1024  # read at once, in the hope that the metadata is in it


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard says of itself. Ids are hex.

    It covers the offsets [start, end): `end - start == rows + duplicates + len(failures) + gap`. `last_id` is the id of
    the record at end - 1, null only when that one was never seen (a gap). `superseded` are ids of rows of this shard
    that stand as failures in it or before it: readers count such an id as a row, not as a failure. `sources` counts by
    source the records whose first outcome is here (not those that could not be read)."""

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
    sources: dict[str, int] = {}
    gap: int
    writer: str
    attempt: str
    created_at: float
    sealed: bool = False


class DamagedShard(Fatal):
    """A file that stands where a shard must and is none, not whole, or of another version."""


def encode(rows: Sequence[Row], footer: Footer) -> memoryview:
    """The bytes of a shard."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, **WRITING) as writer:
        if rows:  # datasets refuses a file with an empty row group, but takes one with none
            tokens = sum(len(row.input_ids) for row in rows)
            writer.write_table(table(rows), row_group_size=max(1, len(rows) * _GROUP_TOKENS // tokens))
        writer.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(footer).decode()})
    return _seal(memoryview(sink.getvalue()))


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
        sealed, tail = _tail(file)
        if tail is None:
            raise DamagedShard(f"{name} is torn or damaged: its metadata is not what was written")
        metadata = pq.read_metadata(pa.BufferReader(tail))
        # Ranges that lie together are fetched together: on an object store every read is a request.
        shard = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True, pre_buffer=True)
        text = (metadata.metadata or {}).get(FOOTER_KEY.encode())
    if text is None:
        raise DamagedShard(f"{name} is a Parquet file, but no shard of tokenhaul")
    try:
        footer = msgspec.json.decode(text, type=Footer)
    except msgspec.DecodeError as error:
        raise DamagedShard(f"{name} has a footer that cannot be read: {error}") from error
    if footer.sealed and not sealed:
        raise DamagedShard(f"{name} is damaged: its seal is gone")
    if footer.schema > VERSION:
        raise DamagedShard(f"{name} was written by a newer tokenhaul (schema {footer.schema}, known is {VERSION})")
    return shard, footer


def check_seal(data: bytes, name: str) -> None:
    """Raise DamagedShard unless all bytes before the metadata are what was written. Shards from before there were seals
    have only their pages' checksums."""
    length = _ENDING_BYTES + int.from_bytes(data[-_ENDING_BYTES:-4], "little")
    pages, seal = memoryview(data)[: -length - _SEAL_BYTES], data[-length - _SEAL_BYTES : -length]
    if seal.startswith(_MARK) and _digest(pages) != seal[len(_MARK) : -_DIGEST_BYTES]:
        raise DamagedShard(f"{name} is damaged: its pages are not what was written")


def _seal(data: memoryview) -> memoryview:
    at = len(data) - _ENDING_BYTES - int.from_bytes(data[-_ENDING_BYTES:-4], "little")
    pages, tail = data[:at], data[at:]
    return memoryview(b"".join((pages, _MARK, _digest(pages), _digest(tail), tail)))


def _tail(file: BinaryIO) -> tuple[bool, bytes | None]:
    """Whether there is a seal, and the metadata to the end of the file; None when that is not what was sealed."""
    size = file.seek(0, io.SEEK_END)
    wanted = _TAIL_BYTES
    while True:
        start = max(0, size - wanted)
        file.seek(start)
        data = file.read(size - start)
        length = _ENDING_BYTES + int.from_bytes(data[-_ENDING_BYTES:-4], "little")
        if (mark := data.rfind(_MARK)) >= 0:  # wherever: the length may be what is damaged
            tail = data[mark + _SEAL_BYTES :]
            intact = len(tail) == length and _digest(tail) == data[mark + len(_MARK) + _DIGEST_BYTES :][:_DIGEST_BYTES]
            return True, tail if intact else None
        if not start:
            return False, data[-length:]
        wanted = length + _SEAL_BYTES if len(data) < length + _SEAL_BYTES < size else size


def _digest(data: Data) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def row_ids(shard: pq.ParquetFile) -> Ids:
    """The ids of all rows. Raises ValueError for what is no id."""
    found = []
    for column in shard.read(columns=["id"]).column("id").chunks:
        chunk = cast(pa.StringArray, column)
        if chunk.null_count or (np.asarray(pc.binary_length(chunk)) != _ID_DIGITS).any():
            raise ValueError("an id is not 32 hex digits")
        # All are equally long: together they are one text.
        begin, texts = chunk.offset * _ID_DIGITS, chunk.buffers()[2]
        found.append(unhexlify(memoryview(texts)[begin : begin + len(chunk) * _ID_DIGITS] if texts else b""))
    return unpack(b"".join(found))
