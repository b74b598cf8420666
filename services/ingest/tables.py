"""Rows of Parquet files within bounds: what a small file stands for is counted before any of it is made.

Text is read as Arrow's dictionaries, which hold a value once however often it stands in the file; the size that a row
would have is known from them, and a row too long is never made. What the footer says of a row group decides how
many rows are decoded at once, and whether it is a bomb. A footer that was forged can hide a page: the format itself
ends a page at 2 GiB. Lists of numbers are decoded as long as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.ingest.lines import MAX_BATCH_BYTES, MAX_LINE_BYTES, size_of

_ROWS_AT_ONCE = 256
_GROUP_BYTES = 256 * 1024 * 1024  # of a row group, within which rows may be of any sizes
_MOST_PACKED = 1000  # times: text packs 3 to 20 times, the same prompt again and again some 100 times
_JSON_BYTES = 2  # that a value takes at least as JSON: a digit and a comma

_Sizes = npt.NDArray[np.int64]


class Table:
    """One Parquet file. Raises what Arrow raises, and ValueError for a row group that is a bomb."""

    def __init__(self, file: BinaryIO) -> None:
        metadata = pq.read_metadata(file)
        leaves = [metadata.schema.column(number) for number in range(len(metadata.schema.names))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        self._size = size_of(file)
        self._file = pq.ParquetFile(file, metadata=metadata, read_dictionary=texts)
        as_written = pq.ParquetFile(file, metadata=metadata).schema_arrow
        self._plain = pa.schema([_plain(field) for field in as_written])
        self.rows: int = metadata.num_rows

    def read(self, start: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(number, row) of those behind the first `start`; None for a row that would be longer than a line may be."""
        row = 0
        for group in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if row + rows > start:
                at_once = self._rows_at_once(group)
                for batch in self._file.iter_batches(at_once, row_groups=[group]):
                    skipped = min(len(batch), max(0, start - row))
                    yield from enumerate(self._made(batch.slice(skipped)), row + skipped + 1)
                    row += len(batch)
            else:
                row += rows

    def _rows_at_once(self, group: int) -> int:
        """How many rows of a group may be decoded together. Raises ValueError for a bomb."""
        # Of the group as a whole: pyarrow ends the process when it looks at a column of a damaged footer.
        size = self._file.metadata.row_group(group).total_byte_size
        if size <= _GROUP_BYTES:
            return _ROWS_AT_ONCE
        if size > _MOST_PACKED * self._size:
            raise ValueError(f"row group {group} is a bomb: a file of {self._size} bytes has {size} in it")
        return max(1, _ROWS_AT_ONCE * _GROUP_BYTES // size)

    def _made(self, batch: pa.RecordBatch) -> Iterator[dict[str, Any] | None]:
        batch.validate(full=True)  # a damaged file may point behind its dictionary, where Arrow would look
        sizes = sum(map(_sizes, batch.columns), np.zeros(len(batch), np.int64))
        start = 0
        while start < len(batch):
            if sizes[start] > MAX_LINE_BYTES:
                yield None
                start += 1
                continue
            fit = int(np.searchsorted(np.cumsum(sizes[start:]), MAX_BATCH_BYTES, "right"))
            end = start + max(1, fit)
            # `take` leaves the values of other rows behind, which a cast of a slice would write out as well.
            few = batch if end - start == len(batch) else batch.take(pa.array(range(start, end)))
            yield from few.cast(self._plain).to_pylist()
            start = end


def _plain(field: pa.Field[Any]) -> pa.Field[Any]:
    """Without what texts in dictionaries cannot be cast to: dictionaries, and Arrow's views."""
    kind: Any = field.type
    if pa.types.is_dictionary(kind):
        return _plain(field.with_type(kind.value_type))
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return field.with_type(pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary())
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_plain(kind.field(number)) for number in range(kind.num_fields)]))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return field.with_type((pa.list_ if pa.types.is_list(kind) else pa.large_list)(_plain(kind.value_field)))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return field.with_type(pa.large_list(_plain(kind.value_field)))
    return field


def _sizes(array: pa.Array[Any]) -> _Sizes:
    """How many bytes each value is at least, written as JSON with all that is in it."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _sizes(array.storage)
    if isinstance(array, pa.DictionaryArray):
        words = np.append(_sizes(array.dictionary), 0)
        return np.asarray(words[array.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False)], np.int64)
    if isinstance(array, pa.StructArray):
        inside = (_sizes(array.field(number)) for number in range(kind.num_fields))
        return sum(inside, np.zeros(len(array), np.int64))
    if isinstance(array, pa.ListViewArray | pa.LargeListViewArray):
        raise ValueError("lists that are views are not read: write lists")
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.MapArray):
        offsets = array.offsets.to_numpy()
        inner = _sizes(array.keys) + _sizes(array.items) if isinstance(array, pa.MapArray) else _sizes(array.values)
        before = np.concatenate([[0], np.cumsum(_JSON_BYTES + inner)])
        return np.asarray(before[offsets[1:]] - before[offsets[:-1]], np.int64)
    if pa.types.is_fixed_size_binary(kind):
        return np.full(len(array), kind.byte_width, np.int64)
    if isinstance(array, pa.StringArray | pa.LargeStringArray | pa.BinaryArray | pa.LargeBinaryArray):
        return np.asarray(pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    return np.full(len(array), 0, np.int64)
