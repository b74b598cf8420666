"""How much of an output repeats itself: models that got caught in a loop show here.

`repetition` of an output is the share of its tokens that lie in a repeated n-gram: NGRAM consecutive ids that stood in
the same output before (the first occurrence does not count; the later one may overlap it). An output that says
everything once has 0; a loop comes near 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NGRAM = 8
"""About a clause. Shorter runs repeat in any honest text, and code and tables repeat them a lot."""

_CHUNK_TOKENS = 1 << 20
# Odd constants (as in xxHash): multiplying by them loses no bit.
_PRIMES = tuple(np.uint64(prime) for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


def repetition(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """The share for each of the outputs standing one after the other in `ids`: shape (len(lengths),), in [0, 1].

    Works through about a million tokens at a time, 60 bytes each; O(n log n)."""
    shares = np.zeros(len(lengths), np.float32)
    ends = np.cumsum(lengths)
    row = 0
    while row < len(lengths):
        begin = int(ends[row] - lengths[row])
        stop = max(row + 1, int(np.searchsorted(ends, begin + _CHUNK_TOKENS, side="right")))
        shares[row:stop] = _chunk(ids[begin : ends[stop - 1]], lengths[row:stop])
        row = stop
    return shares


def _chunk(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    if len(ids) < NGRAM:
        return np.zeros(len(lengths))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    place = np.arange(len(ids)) - np.repeat(starts, lengths)  # of each token in its output
    # A number that holds the hash of the n-gram beginning here and, in its low bits, where that is: sorted, equal
    # n-grams of an output stand side by side, the earliest first. 40 bits of hash or more stay.
    low = (np.uint64(1) << np.uint64(int(lengths.max()).bit_length())) - np.uint64(1)
    keys = np.zeros(len(ids), np.uint64)
    keys[: len(ids) - NGRAM + 1] = _hashes(ids)
    keys = (keys & ~low) | place.astype(np.uint64)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        keys[start : max(start, end - NGRAM + 1)].sort()
    equal = (keys[1:] & ~low) == (keys[:-1] & ~low)
    later = 1 + np.flatnonzero(equal & (place[1:] > 0) & (place[1:] <= np.repeat(lengths - NGRAM, lengths)[1:]))
    first = later - place[later] + (keys[later] & low).astype(np.int64)
    covered = np.zeros(len(ids) + 1, np.int64)
    np.add.at(covered, first, 1)
    np.subtract.at(covered, first + NGRAM, 1)
    total = np.concatenate(([0], np.cumsum(np.cumsum(covered[:-1]) > 0)))
    shares: NDArray[np.float64] = (total[ends] - total[starts]) / np.maximum(lengths, 1)
    return shares


def _hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Of every n-gram: the length they cover doubles three times, and 2^3 is NGRAM. Meant for their high bits."""
    hashes = ids.astype(np.uint64) * _PRIMES[0]
    for power, prime in enumerate(_PRIMES):
        hashes = hashes[: -(1 << power)] * prime + hashes[1 << power :]
    return hashes
