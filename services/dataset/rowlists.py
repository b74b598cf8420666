"""Rows of token ids, cut to a maximum, as the formats need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from services.dataset.filters import numbers

_IDS = pa.list_(pa.int32())


class TokenRow:
    """`input_ids` of a row, at most `max_length` of them, of which the first `prompt_length` are the prompt's."""

    __slots__ = ("input_ids", "prompt_length")

    def __init__(self, input_ids: NDArray[np.int32], prompt_length: int) -> None:
        self.input_ids, self.prompt_length = input_ids, prompt_length

    @property
    def loss_mask(self) -> list[int]:
        """0 for the prompt's ids, 1 for the output's; not shifted."""
        return [0] * self.prompt_length + [1] * (len(self.input_ids) - self.prompt_length)


def token_rows(table: pa.Table, max_length: int) -> Iterator[TokenRow]:
    """The rows of a table with input_ids and prompt_length."""
    array: Any = pa.concat_arrays(table.column("input_ids").chunks) if len(table) else pa.array([], _IDS)
    values, offsets = array.values.to_numpy(), array.offsets.to_numpy()
    for start, end, prompt in zip(offsets[:-1], offsets[1:], numbers(table, "prompt_length").tolist(), strict=True):
        yield TokenRow(values[start : min(end, start + max_length)], prompt)
