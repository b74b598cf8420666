"""Bytes a token takes on the topic and in shards: Qwen3's ids of real text, in rows of several lengths.

On the topic every record is compressed alone, so a short one learns little of what its ids have in common: the budget
holds for 8,000 tokens, the length of a sequence with reasoning.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from schemas.sequences import Sequence
from services.kernel.codec import LEVEL, Encoder
from services.sink.parquet import TOKEN_COLUMNS, Footer, encode
from services.sink.rows import row
from tests.bench.qwen3 import pieces, prompt_text, python_text
from tests.bench.table import Line
from tests.support.outcomes import DATASET, make_sequence

PROMPT_SHARE = 0.4
LENGTHS = (500, 2000, 8000)


def measure() -> list[Line]:
    """The shipped prompts are held against the budget; Python's library shows another kind of text."""
    lines: list[Line] = []
    for text, ids in (("shipped prompts", prompt_text()), ("Python's library", python_text())):
        held = text == "shipped prompts"
        for length in LENGTHS:
            rows = [_sequence(number, piece) for number, piece in enumerate(pieces(ids, length))]
            tokens = len(ids)
            raw = [np.array([*each.prompt.prompt_ids, *each.output_ids], np.uint32).tobytes() for each in rows]
            lines.append(
                Line(
                    name=f"{text}, rows of {length}, on the topic",
                    value=sum(map(_topic_bytes, rows)) / tokens,
                    unit="bytes/token",
                    reference=sum(len(zstandard.compress(each, LEVEL)) for each in raw) / tokens,
                    reference_name="zstd of the raw ids",
                    at_most=1.15 if held and length == 8000 else None,
                )
            )
            lines.append(
                Line(
                    name=f"{text}, rows of {length}, in shards",
                    value=_shard_bytes(rows) / tokens,
                    unit="bytes/token",
                    reference=len(zstandard.compress(b"".join(raw), LEVEL)) / tokens,
                    reference_name="zstd of the raw ids",
                    at_most=1.10 if held else None,
                )
            )
    return lines


def _sequence(number: int, ids: list[int]) -> Sequence:
    cut = int(len(ids) * PROMPT_SHARE)
    return make_sequence(number, ids[cut:], prompt={"prompt_ids": ids[:cut]})


def _topic_bytes(sequence: Sequence) -> int:
    """What the ids add to the message."""
    encoder = Encoder()
    bare = msgspec.structs.replace(
        sequence, prompt=msgspec.structs.replace(sequence.prompt, prompt_ids=[]), output_ids=[]
    )
    return len(encoder.encode(sequence)) - len(encoder.encode(bare))


def _shard_bytes(rows: list[Sequence]) -> int:
    """The token columns of a shard that holds the rows."""
    footer = Footer(
        dataset=DATASET.name, model=DATASET.model, partition=0, partitions=DATASET.partitions, start=0, end=len(rows),
        last_id=None, rows=len(rows), duplicates=0, failures=[], superseded=[], gap=0, writer="", attempt="",
        created_at=0.0,
    )  # fmt: skip
    shard = encode([row(each, offset) for offset, each in enumerate(rows)], footer)
    metadata = pq.ParquetFile(pa.BufferReader(shard)).metadata
    columns = [
        metadata.row_group(group).column(number)
        for group in range(metadata.num_row_groups)
        for number in range(metadata.num_columns)
    ]
    return sum(column.total_compressed_size for column in columns if column.path_in_schema.startswith(TOKEN_COLUMNS))
