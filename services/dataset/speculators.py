"""What speculators trains on: its arrow directory, and JSON lines for `speculators prepare-data`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, file_digest
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from services.dataset.rowlists import token_rows
from services.dataset.specforge import write_jsonl
from services.dataset.vocab import Frequencies, draft_vocabulary, save_frequencies_pt, save_npy

_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int64()), "loss_mask": pa.list_(pa.int64()), "seq_len": pa.int64()})
_FEATURES = {
    "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
}


class Speculators:
    """train/arrow (what `datasets.load_from_disk` opens) and train/jsonl, the same for eval; `kinds` says which.

    The arrow directory of the split to train on holds token_freq.pt, d2t-N.npy and t2d-N.npy, where speculators looks
    for them."""

    columns = ("id", "input_ids", "prompt_length", "source", "finish_reason")

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        token_freq: bool,
        draft_vocab_size: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._kinds, self._token_freq = kinds, token_freq
        self._draft_vocab_size, self._vocab_size = draft_vocab_size, vocab_size

    def files(self, split: str, number: int, of: int) -> list[str]:
        """See export.Format."""
        names = {
            "arrow": f"{split}/arrow/data-{number:05d}-of-{of:05d}.arrow",
            "jsonl": f"{split}/jsonl/{split}-{number:05d}-of-{of:05d}.jsonl",
        }
        return [names[kind] for kind in self._kinds]

    def write(self, paths: Sequence[Path], table: pa.Table, max_length: int) -> None:
        """See export.Format."""
        for kind, path in zip(self._kinds, paths, strict=True):
            (_write_arrow if kind == "arrow" else write_jsonl)(path, table, max_length)

    def finish(self, out: Path, files: dict[str, list[str]], frequencies: Frequencies) -> None:
        """See export.Format."""
        for split, names in files.items():
            if arrow := [Path(name).name for name in names if name.endswith(".arrow")]:
                _describe(out / split / "arrow", arrow)
        folder = out / "train" / "arrow" if "arrow" in self._kinds else out
        if self._token_freq:
            save_frequencies_pt(folder / "token_freq.pt", frequencies)
        if self._draft_vocab_size and self._vocab_size:
            save_npy(folder, draft_vocabulary(frequencies, self._draft_vocab_size, self._vocab_size))


def _write_arrow(path: Path, table: pa.Table, max_length: int) -> None:
    """One file of a dataset of Hugging Face: an Arrow stream."""
    rows = list(token_rows(table, max_length))
    lengths = np.array([len(row.input_ids) for row in rows], np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    prompts = np.array([row.prompt_length for row in rows], np.int64)
    mask = np.repeat(np.tile(np.array([0, 1]), len(rows)), np.stack([prompts, lengths - prompts], axis=1).ravel())
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([row.input_ids for row in rows]), pa.int64())),
        pa.ListArray.from_arrays(offsets, pa.array(mask, pa.int64())),
        pa.array(lengths),
    ]
    schema = _SCHEMA.with_metadata({"huggingface": msgspec.json.encode({"info": {"features": _FEATURES}})})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=schema), max_chunksize=1000)


def _describe(folder: Path, files: list[str]) -> None:
    """What `save_to_disk` writes beside the data. `torch`: rows are read as tensors, which speculators relies on."""
    digest = blake2b(digest_size=8)  # of the data: what `datasets` caches of one export must never serve for another
    for name in files:
        with (folder / name).open("rb") as file:
            digest.update(file_digest(file, "blake2b").digest())
    state = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": digest.hexdigest(),
        "_format_columns": ["input_ids", "loss_mask", "seq_len"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    (folder / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    (folder / "dataset_info.json").write_bytes(msgspec.json.format(msgspec.json.encode(info)))
