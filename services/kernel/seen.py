"""The index of record ids seen: 16 bytes an id in sorted arrays, looked up and filled in batches.

A Python set of bytes costs ~100 bytes an id. Here ids are sorted by their high half alone: they are hashes, so two with
the same one hardly ever meet, and those that do stand side by side.

Most ids are in chunks of about a million, each with a range of its own. New ones come in runs, of which each is at most
half as long as the one before it; when the runs hold a sixteenth of all, they go into the chunks, one chunk at a time.
So growing takes a seventeenth of the memory more, and no moment takes twice of it: 18 bytes an id at most from a few
million ids on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 20
_RUNS_SHARE = 16

Ids = NDArray[np.uint64]
"""Shape (n, 2): the halves of each id, big-endian read as one number each."""

_Half = NDArray[np.uint64]
_Run = tuple[_Half, _Half]
"""High and low halves, sorted by the high ones."""


def pack(ids: Sequence[bytes]) -> Ids:
    """Ids of 16 bytes each as one array."""
    return unpack(b"".join(ids))


def unpack(ids: bytes) -> Ids:
    """The same from all bytes in a row."""
    return np.frombuffer(ids, dtype=">u8").astype(np.uint64).reshape(-1, 2)


class SeenIds:
    """A set of record ids."""

    def __init__(self) -> None:
        self._chunks: list[_Run] = []  # of ascending ranges: chunk n begins at _bounds[n - 1]
        self._bounds = np.empty(0, np.uint64)
        self._runs: list[_Run] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the index."""
        return sum(high.nbytes + low.nbytes for high, low in (*self._chunks, *self._runs))

    def __contains__(self, id: bytes) -> bool:
        return bool(self.contains(pack([id]))[0])

    def contains(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of `ids` are in: shape (n,)."""
        order = np.argsort(ids[:, 0])
        found = np.empty(len(ids), np.bool_)
        found[order] = self._contains((ids[order, 0], ids[order, 1]))
        return found

    def add(self, ids: Ids) -> None:
        """Put `ids` in; those already in, or twice in `ids`, count once."""
        high, low = _sorted(ids)
        new = ~self._contains((high, low))
        if not new.any():
            return
        self._runs.append((high[new], low[new]))
        self._count += int(new.sum())
        while len(self._runs) > 1 and 2 * len(self._runs[-1][0]) > len(self._runs[-2][0]):
            self._runs[-2:] = [_merged(*self._runs[-2:])]
        if sum(len(high) for high, _ in self._runs) * _RUNS_SHARE > max(self._count, _CHUNK):
            self._settle()

    def _contains(self, queries: _Run) -> NDArray[np.bool_]:
        """`queries` are sorted: neighbours are looked for in the same place."""
        found = np.zeros(len(queries[0]), np.bool_)
        for run in self._runs:
            found |= _found(run, queries)
        for chunk, part in self._by_chunk(queries):
            found[part] |= _found(self._chunks[chunk], (queries[0][part], queries[1][part]))
        return found

    def _by_chunk(self, run: _Run) -> Iterator[tuple[int, slice]]:
        """(chunk, the part of `run` in its range)."""
        cuts = [0, *np.searchsorted(run[0], self._bounds).tolist(), len(run[0])]
        for chunk in range(len(self._chunks)):
            if cuts[chunk] < cuts[chunk + 1]:
                yield chunk, slice(cuts[chunk], cuts[chunk + 1])

    def _settle(self) -> None:
        """Put the runs into the chunks."""
        run = self._runs.pop(0)
        while self._runs:
            run = _merged(run, self._runs.pop(0))
        if not self._chunks:
            self._chunks = [(np.empty(0, np.uint64), np.empty(0, np.uint64))]
        for chunk, part in list(self._by_chunk(run)):
            self._chunks[chunk] = _merged(self._chunks[chunk], (run[0][part], run[1][part]))
        self._chunks = [piece for chunk in self._chunks for piece in _split(chunk)]
        self._bounds = np.array([high[0] for high, _ in self._chunks[1:]], np.uint64)


def _sorted(ids: Ids) -> _Run:
    """Each once."""
    order = np.argsort(ids[:, 0])
    high, low = ids[order, 0], ids[order, 1]
    if (high[1:] == high[:-1]).any():
        order = np.lexsort((low, high))
        high, low = high[order], low[order]
        first = np.ones(len(high), np.bool_)
        first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        high, low = high[first], low[first]
    return high, low


def _found(run: _Run, queries: _Run) -> NDArray[np.bool_]:
    (high, low), (wanted, wanted_low) = run, queries
    found = np.zeros(len(wanted), np.bool_)
    at = np.searchsorted(high, wanted)
    left = np.flatnonzero(at < len(high))
    while len(left := left[high[at[left]] == wanted[left]]):
        found[left] |= low[at[left]] == wanted_low[left]
        at[left] += 1
        left = left[~found[left] & (at[left] < len(high))]
    return found


def _merged(one: _Run, other: _Run) -> _Run:
    (high, low), (more_high, more_low) = one, other
    places = np.searchsorted(high, more_high) + np.arange(len(more_high))
    rest = np.ones(len(high) + len(more_high), np.bool_)
    rest[places] = False
    merged = np.empty(len(rest), np.uint64), np.empty(len(rest), np.uint64)
    for into, old, new in zip(merged, (high, low), (more_high, more_low), strict=True):
        into[places], into[rest] = new, old
    return merged


def _split(chunk: _Run) -> Iterator[_Run]:
    """Pieces of about _CHUNK ids, none beginning amid ids of one high half; copies, so that the whole can go."""
    high, low = chunk
    if len(high) <= 2 * _CHUNK:
        yield chunk
        return
    wanted = [high[index] for index in range(_CHUNK, len(high) - _CHUNK // 2, _CHUNK)]
    cuts = sorted({0, *np.searchsorted(high, np.array(wanted)).tolist(), len(high)})
    for begin, end in pairwise(cuts):
        yield high[begin:end].copy(), low[begin:end].copy()
