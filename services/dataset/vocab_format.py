"""`tokenhaul export vocab`: the draft vocabulary alone, in the forms of both trainers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from services.dataset.vocab import (
    Frequencies,
    draft_vocabulary,
    save_frequencies_pt,
    save_mapping_pt,
    save_npy,
)


class Vocab:
    """d2t-N.npy, t2d-N.npy and token_freq.npy; with PyTorch also vocab_mapping.pt and token_freq.pt."""

    columns = ("id", "input_ids", "prompt_length")

    def __init__(self, size: int, vocab_size: int, *, pt: bool) -> None:
        self._size, self._vocab_size, self._pt = size, vocab_size, pt

    def files(self, split: str, number: int, of: int) -> list[str]:
        """See export.Format: rows are counted, not written."""
        return []

    def write(self, paths: Sequence[Path], table: pa.Table, max_length: int) -> None:
        """See export.Format."""

    def finish(self, out: Path, files: dict[str, list[str]], frequencies: Frequencies) -> None:
        """See export.Format."""
        mapping = draft_vocabulary(frequencies, self._size, self._vocab_size)
        save_npy(out, mapping)
        counts = np.zeros(self._vocab_size, np.int64)
        counts[: len(frequencies.counts)] = frequencies.counts
        np.save(out / "token_freq.npy", counts)
        if self._pt:
            save_mapping_pt(out / "vocab_mapping.pt", mapping)
            save_frequencies_pt(out / "token_freq.pt", frequencies)
