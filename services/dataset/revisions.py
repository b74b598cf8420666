"""The highest revision of every request that was asked more than once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from services.kernel.seen import Ids, pack


class Revisions:
    """Request ids with a revision above 0 and their highest: 20 bytes each. All others have revision 0."""

    def __init__(self, ids: Ids, revisions: NDArray[np.int32]) -> None:
        order = np.lexsort((revisions, ids[:, 1], ids[:, 0]))
        ids, revisions = ids[order], revisions[order]
        last = np.ones(len(ids), np.bool_)
        last[:-1] = (ids[1:] != ids[:-1]).any(axis=1)  # of each request, the highest revision stands last
        self._ids, self._revisions = ids[last], revisions[last]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def highest(self) -> int:
        """Of all requests; 0 when none was asked again."""
        return int(self._revisions.max(initial=0))

    def outdated(self, requests: pa.ChunkedArray[Any], revisions: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which rows are not of their request's highest revision: shape (rows,)."""
        if not len(self):
            return np.zeros(len(revisions), np.bool_)
        return revisions < self._of(unhex(requests))

    def _of(self, ids: Ids) -> NDArray[np.int32]:
        """The highest revision of each request, 0 for those never asked again."""
        found = np.zeros(len(ids), np.int32)
        open_ = np.arange(len(ids))
        places = np.searchsorted(self._ids[:, 0], ids[:, 0])
        while len(open_):
            inside = places < len(self)
            open_, places = open_[inside], places[inside]
            same_half = self._ids[places, 0] == ids[open_, 0]
            open_, places = open_[same_half], places[same_half]
            hit = self._ids[places, 1] == ids[open_, 1]
            found[open_[hit]] = self._revisions[places[hit]]
            open_, places = open_[~hit], places[~hit] + 1
        return found


def unhex(column: pa.ChunkedArray[Any]) -> Ids:
    """A column of ids (32 hex digits each) as numbers: shape (rows, 2)."""
    return pack([bytes.fromhex("".join(map(str, column.to_pylist())))])
