"""Messages of the topic `<prefix>.cursors` (compacted): how far a source's file has been published."""

from __future__ import annotations

import msgspec


class Cursor(msgspec.Struct, tag="cursor.v1", frozen=True, kw_only=True, omit_defaults=True):
    """Written in the transaction of the prompts it covers.

    `offset` is the byte after the last line taken, `row` the number of lines taken; `head` is the hash of the first
    `head_bytes` bytes, by which a file that was replaced is noticed; `settings` is the hash of what the source asked
    for, by which a changed request is noticed. `refused` counts by reason.

    `tail` is the hash of the `tail_bytes` bytes before `offset`, `inode` a hint where to look for a renamed file;
    `records` counts what was handed on since `offset` 0; `complete`: the file was read to the end it had; `selection`
    is the hash of the sample taken of it. What is written once and then read (compressed files, JSON, Parquet) is
    known by `head`, a hash of both ends, and `head_bytes`, its size; `row` alone tells the place in it."""

    source: str
    file: str
    revision: int
    offset: int
    row: int
    head: bytes
    head_bytes: int
    settings: bytes
    published: int
    repeated: int
    refused: dict[str, int] = {}
    inode: int = 0
    tail: bytes = b""
    tail_bytes: int = 0
    records: int = 0
    complete: bool = False
    selection: bytes = b""
