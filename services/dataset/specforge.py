"""Files for SpecForge's `data.prompts_path`: pre-tokenised JSON lines that it never tokenises again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from services.dataset.rowlists import token_rows
from services.dataset.vocab import Frequencies, draft_vocabulary, save_mapping_pt, save_npy

CONTEXT_HEADROOM = 7
"""Slots of the context that SpecForge's capture server keeps for itself (SGLANG_CAPTURE_CONTEXT_HEADROOM)."""


class SpecForge:
    """`train-00000-of-00003.jsonl`, one row a line, and `vocab_mapping.pt` when a draft vocabulary is asked for
    (without `pt` its arrays as .npy files, which SpecForge does not take as they are)."""

    columns = ("id", "input_ids", "prompt_length", "source", "finish_reason")

    def __init__(self, *, pt: bool, draft_vocab_size: int | None = None, vocab_size: int | None = None) -> None:
        self._pt, self._draft_vocab_size, self._vocab_size = pt, draft_vocab_size, vocab_size

    def files(self, split: str, number: int, of: int) -> list[str]:
        """See export.Format."""
        return [f"{split}-{number:05d}-of-{of:05d}.jsonl"]

    def write(self, paths: Sequence[Path], table: pa.Table, max_length: int) -> None:
        """See export.Format."""
        write_jsonl(paths[0], table, max_length)

    def finish(self, out: Path, files: dict[str, list[str]], frequencies: Frequencies) -> None:
        """See export.Format."""
        if self._draft_vocab_size and self._vocab_size:
            mapping = draft_vocabulary(frequencies, self._draft_vocab_size, self._vocab_size)
            if self._pt:
                save_mapping_pt(out / "vocab_mapping.pt", mapping)
            else:
                save_npy(out, mapping)


def write_jsonl(path: Path, table: pa.Table, max_length: int) -> None:
    """One object a line: id, input_ids, loss_mask (as long, 0 or 1), source, finish_reason."""
    encode = msgspec.json.Encoder().encode
    columns = [table.column(name).to_pylist() for name in ("id", "source", "finish_reason")]
    with path.open("wb") as file:
        for row, id, source, reason in zip(token_rows(table, max_length), *columns, strict=True):
            line = {
                "id": id,
                "input_ids": row.input_ids.tolist(),
                "loss_mask": row.loss_mask,
                "source": source,
                "finish_reason": reason,
            }
            file.write(encode(line))
            file.write(b"\n")
