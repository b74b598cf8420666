"""Exports of the demo, loaded unchanged by the trainers' own code (run.sh installs it): specforge, speculators.

It runs in the trainers' environment: no fixtures of the other tests, and imports that are missing are failures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.data.loss_mask import has_consecutive_supervised_tokens
from specforge.data.prompt_builder import prepare_prompt_tasks
from specforge.utils import safe_conversations_generator
from speculators.data_generation.preprocessing import load_and_preprocess_dataset
from speculators.train.cli import _load_mappings
from speculators.train.data import ArrowDataset, build_client_item
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from services.cli import main
from services.dataset import place
from services.dataset.reader import View
from services.dataset.specforge import CONTEXT_HEADROOM

DEMO = Path(os.environ["TRAINERS_DEMO"])
ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "services" / "local" / "data" / "smollm2"
VOCAB_SIZE, DRAFT_SIZE, MAX_LENGTH = 49152, 1000, 256


def export(out: Path, format: str, *arguments: object) -> Path:
    words = ["export", format, "--dataset", DEMO, "--out", out, "--max-length", MAX_LENGTH, "--tokenizer", TOKENIZER]
    assert main([*map(str, words), *map(str, arguments)]) == 0
    return out


def lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]


def stored() -> dict[str, tuple[list[int], list[int]]]:
    """{id: (input_ids, loss_mask)} as the rows hold them, cut to MAX_LENGTH."""
    found = {}
    for table in View(place.find(str(DEMO))).rows(["id", "input_ids", "loss_mask"]):
        for row in table.to_pylist():
            found[row["id"]] = (row["input_ids"][:MAX_LENGTH], row["loss_mask"][:MAX_LENGTH])
    return found


def test_the_packages_are_the_ones_we_say() -> None:
    assert (version("specforge"), version("speculators")) == ("0.2.0", "0.9.0")


@pytest.mark.parametrize("dflash", [False, True], ids=["eagle3", "dflash"])
def test_specforge_takes_every_row_as_it_is(tmp_path: Path, dflash: bool) -> None:
    out = export(tmp_path / "out", "specforge", "--tokens-per-file", 4000, *(["--dflash"] if dflash else []))
    files = sorted(out.glob("train-*.jsonl"))
    assert len(files) > 1
    rows = stored()
    for file in files:
        tasks = prepare_prompt_tasks(
            file, None, chat_template=None, max_length=MAX_LENGTH, is_preformatted=False, train_only_last_turn=False,
            cache_dir=None, cache_key=None, num_proc=None, min_loss_tokens=2 if dflash else 1,
            loss_mask_filter=has_consecutive_supervised_tokens if dflash else None,
        )  # fmt: skip
        written = lines(out, file.name)
        assert len(tasks) == len(written), "it dropped none"
        for task, row in zip(tasks, written, strict=True):
            assert (task["payload"]["input_ids"], task["payload"]["loss_mask"]) == rows[row["id"]]


def test_specforge_takes_the_vocabulary(tmp_path: Path) -> None:
    out = export(tmp_path / "out", "specforge", "--draft-vocab-size", DRAFT_SIZE)
    mapping = torch.load(out / "vocab_mapping.pt")
    assert (mapping["d2t"].dtype, tuple(mapping["d2t"].shape)) == (torch.int64, (DRAFT_SIZE,))
    assert (mapping["t2d"].dtype, tuple(mapping["t2d"].shape)) == (torch.bool, (VOCAB_SIZE,))
    validate_vocab_mapping_consistency(mapping["t2d"], mapping["d2t"])


def test_specforge_takes_the_configuration_of_the_docs(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    config = tmp_path / "run.yaml"
    config.write_text(text.replace("/models/Qwen3-32B", str(TOKENIZER)))

    def plan(*overrides: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "specforge.cli", "train", "--config", str(config), "--plan", *overrides]
        return subprocess.run(words, capture_output=True, text=True, timeout=100)

    planned = plan()
    assert planned.returncode == 0, planned.stderr
    assert str(4096 + CONTEXT_HEADROOM) in planned.stdout, "the capture server's context"
    assert "require model.vocab_mapping_path" in plan("model.vocab_mapping_path=").stderr


def test_speculators_opens_the_arrow_directory(tmp_path: Path) -> None:
    out = export(tmp_path / "out", "speculators", "--tokens-per-file", 4000, "--draft-vocab-size", DRAFT_SIZE)
    arrow = out / "train" / "arrow"
    written = lines(out / "train" / "jsonl", "*.jsonl")
    hidden = arrow / "hidden_states"
    hidden.mkdir()
    first = written[0]["input_ids"]
    states = {"token_ids": torch.tensor(first), "hidden_states": torch.zeros(len(first), 4, 8)}
    save_file(states, str(hidden / "hs_0.safetensors"))
    data = ArrowDataset(MAX_LENGTH, arrow, on_missing="raise")
    assert len(data) == len(written)
    assert data.approx_lengths == [len(row["input_ids"]) for row in written]
    for item, row in zip(data.data, written, strict=True):
        assert build_client_item(item) == {"input_ids": row["input_ids"]}
        assert item["loss_mask"].tolist() == row["loss_mask"]
    sample = data[0]
    assert sample["input_ids"].tolist() == first
    assert sample["loss_mask"].tolist() == written[0]["loss_mask"]


def test_speculators_makes_the_same_vocabulary_of_the_frequencies(tmp_path: Path) -> None:
    out = export(tmp_path / "out", "speculators", "--draft-vocab-size", DRAFT_SIZE) / "train" / "arrow"
    frequencies = torch.load(out / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, DRAFT_SIZE, VOCAB_SIZE)
    ours = _load_mappings(out / f"d2t-{DRAFT_SIZE}.npy", out / f"t2d-{DRAFT_SIZE}.npy", DRAFT_SIZE)
    assert torch.equal(ours[0], d2t)
    assert torch.equal(ours[1], t2d)
    counted: dict[int, int] = {}
    for ids, mask in stored().values():
        for id in np.array(ids)[np.array(mask) == 1].tolist():
            counted[id] = counted.get(id, 0) + 1
    assert frequencies == counted


def test_speculators_prepares_the_json_lines_without_rendering(tmp_path: Path) -> None:
    out = export(tmp_path / "out", "speculators", "--as", "jsonl")
    prepared, _ = load_and_preprocess_dataset(
        str(TOKENIZER), [str(out / "train" / "jsonl")], seq_length=MAX_LENGTH, build_dataset_num_proc=1
    )
    found = sorted((row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in prepared)
    assert found == sorted((list(ids), list(mask)) for ids, mask in stored().values())


def test_vocab_alone_is_the_same_in_all_forms(tmp_path: Path) -> None:
    out = export(tmp_path / "out", "vocab", "--draft-vocab-size", DRAFT_SIZE)
    mapping = torch.load(out / "vocab_mapping.pt")
    assert np.load(out / f"d2t-{DRAFT_SIZE}.npy").tolist() == mapping["d2t"].tolist()
    assert np.load(out / f"t2d-{DRAFT_SIZE}.npy").tolist() == mapping["t2d"].tolist()
    counts = np.load(out / "token_freq.npy")
    frequencies = torch.load(out / "token_freq.pt", weights_only=True)
    assert frequencies == {int(id): int(counts[id]) for id in np.flatnonzero(counts)}


def test_conversations_are_read_as_text(tmp_path: Path) -> None:
    out = export(tmp_path / "out", "conversations")
    (file,) = out.glob("train-*.jsonl")
    read = list(safe_conversations_generator(str(file)))
    assert len(read) == len(lines(out, file.name)) > 0
    for row in read:
        assert row["conversations"][-1]["role"] == "assistant"
        assert row["conversations"][-1]["content"]
    assert datasets.load_dataset("json", data_files=str(file), split="train").num_rows == len(read)
