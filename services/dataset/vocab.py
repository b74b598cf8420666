"""How often tokens are supervised, and the draft vocabulary that is made of it.

The rule, the same for both trainers and for every run: tokens by how often they are supervised, the most frequent
first; among equals the lowest id first; when fewer than N distinct tokens are supervised, the lowest ids that are not
among them fill the rest. It is the rule speculators has; SpecForge's own breaks ties by the order of its data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from services.dataset.rowlists import token_rows
from services.kernel.errors import SettingsError

_ROWS_AT_ONCE = 256


class Frequencies:
    """How often each id is supervised: an array as long as the highest id seen needs."""

    def __init__(self, counts: NDArray[np.int64] | None = None) -> None:
        self.counts = np.zeros(0, np.int64) if counts is None else counts

    def add(self, table: pa.Table, max_length: int) -> None:
        """Count the output ids of rows, as far as `max_length` lets them in."""
        for start in range(0, len(table), _ROWS_AT_ONCE):
            rows = token_rows(table.slice(start, _ROWS_AT_ONCE), max_length)
            self.merge(Frequencies(np.bincount(np.concatenate([row.input_ids[row.prompt_length :] for row in rows]))))

    def merge(self, other: Frequencies) -> None:
        """Add what another part counted."""
        if len(other.counts) > len(self.counts):
            self.counts = np.pad(self.counts, (0, len(other.counts) - len(self.counts)))
        self.counts[: len(other.counts)] += other.counts

    def save(self, path: Path) -> None:
        """Write to a .npy file."""
        np.save(path, self.counts)

    @classmethod
    def load(cls, path: Path) -> Frequencies:
        """Read it again."""
        return cls(np.load(path))

    def coverage(self, size: int) -> str:
        """What a draft vocabulary of so many tokens is worth, for people."""
        held = np.sort(self.counts)[::-1][:size].sum() / max(1, self.counts.sum())
        distinct = int(np.count_nonzero(self.counts))
        return (
            f"A draft vocabulary of {size:,} tokens holds {held:.2%} of the supervised tokens to train on "
            f"({distinct:,} distinct ones)."
        )


class Mapping:
    """A draft vocabulary: `targets`, the target ids it is made of, ascending, out of `vocab_size`."""

    def __init__(self, targets: NDArray[np.int64], vocab_size: int) -> None:
        self.targets, self.vocab_size = targets, vocab_size

    @property
    def d2t(self) -> NDArray[np.int64]:
        """What to add to each draft id to get the target's: shape (N,)."""
        return self.targets - np.arange(len(self.targets))

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """Which target ids are in: shape (vocab_size,)."""
        inside = np.zeros(self.vocab_size, np.bool_)
        inside[self.targets] = True
        return inside


def draft_vocabulary(frequencies: Frequencies, size: int, vocab_size: int) -> Mapping:
    """The `size` ids to draft with. Raises SettingsError when the model has fewer, or the rows hold ids beyond."""
    counts = frequencies.counts
    if size > vocab_size:
        raise SettingsError(f"--draft-vocab-size {size} is above the model's vocabulary of {vocab_size}")
    if (beyond := np.flatnonzero(counts[vocab_size:])).size:
        raise SettingsError(
            f"the rows hold id {vocab_size + int(beyond[0])}, but the vocabulary was said to have {vocab_size} ids"
        )
    all_counts = np.zeros(vocab_size, np.int64)
    all_counts[: len(counts)] = counts[:vocab_size]
    # A stable sort keeps ids ascending among equals, zero counts included: that is the whole rule.
    chosen = np.argsort(-all_counts, kind="stable")[:size]
    return Mapping(np.sort(chosen), vocab_size)


def save_npy(folder: Path, mapping: Mapping) -> list[Path]:
    """`d2t-N.npy` and `t2d-N.npy`, as speculators takes them (--d2t-path, --t2d-path)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{len(mapping.targets)}.npy" for name in ("d2t", "t2d")]
    np.save(paths[0], mapping.d2t)
    np.save(paths[1], mapping.t2d)
    return paths


def torch(what: str) -> Any:
    """PyTorch. Raises SettingsError, saying for what it is needed and how to do without."""
    try:
        import torch as installed
    except ImportError as error:
        raise SettingsError(
            f"{what} is written by PyTorch, which is not installed: pip install 'tokenhaul[torch]', or do without such "
            "files with --no-pt"
        ) from error
    return installed


def save_mapping_pt(path: Path, mapping: Mapping) -> None:
    """What SpecForge's model.vocab_mapping_path takes."""
    torch_ = torch(path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch_.save({"d2t": torch_.from_numpy(mapping.d2t), "t2d": torch_.from_numpy(mapping.t2d)}, path)


def save_frequencies_pt(path: Path, frequencies: Frequencies) -> None:
    """What speculators' --token-freq-path takes: {id: how often it is supervised}."""
    torch_ = torch(path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    present = np.flatnonzero(frequencies.counts)
    torch_.save(dict(zip(present.tolist(), frequencies.counts[present].tolist(), strict=True)), path)
