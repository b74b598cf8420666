"""Choices that are random to look at and the same every time: by hash of what a row is, never by its place."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]


def keys(seed: int, purpose: str, texts: Iterable[str]) -> Keys:
    """A number for each text, evenly spread over 64 bits; independent for each seed and purpose."""
    salt = f"{seed}/{purpose}".encode()[: blake2b.SALT_SIZE].ljust(blake2b.SALT_SIZE, b"\0")
    digests = b"".join(blake2b(text.encode(), digest_size=8, salt=salt).digest() for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def below(numbers: Keys, share: float) -> NDArray[np.bool_]:
    """Which keys are in the lowest `share` (0 to 1) of all there can be."""
    return np.ones(len(numbers), np.bool_) if share >= 1 else numbers < np.uint64(share * 2**64)


def bucket(numbers: Keys, buckets: int) -> NDArray[np.int64]:
    """Which of so many equal ranges each key is in."""
    high = (numbers >> np.uint64(32)).astype(np.int64)  # 32 bits: the product fits
    return (high * buckets) >> 32
