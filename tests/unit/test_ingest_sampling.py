"""Sampling and the model's facts are resolved completely, or it is said what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.ingest import model, sampling
from services.ingest.model import Model
from services.ingest.sampling import Sampling
from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal

SGLANG_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def resolve(asked: dict[str, Any], generation: dict[str, Any] | None = None, end_ids: tuple[int, ...] = (2,)) -> Any:
    return sampling.resolve(msgspec.convert(asked, Sampling), generation or {}, end_ids, 100, "s")


def facts(folder: Path, config: dict[str, Any], generation: Any = None, **settings: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return model.load(IngestSettings(sources_file="", tokenizer=str(folder), **settings), folder)


def test_everything_stands_explicitly() -> None:
    assert resolve({}) == {**SGLANG_DEFAULTS, "stop_token_ids": [2]}


def test_the_source_wins_over_the_model_and_the_model_over_the_defaults() -> None:
    resolved = resolve({"temperature": 0.1, "stop": ["END"], "top_k": 0}, {"temperature": 0.6, "top_p": 0.8})
    assert resolved == {
        **SGLANG_DEFAULTS, "temperature": 0.1, "top_p": 0.8, "stop": ["END"], "stop_token_ids": [2],
    }  # fmt: skip


def test_stop_ids_are_united_and_sorted() -> None:
    assert resolve({"stop_token_ids": [50, 3]}, end_ids=(9, 2))["stop_token_ids"] == [2, 3, 9, 50]


@pytest.mark.parametrize("asked", [{"stop_token_ids": [100]}, {"logit_bias": {"100": 1.0}}])
def test_ids_beyond_the_vocabulary_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(Fatal, match=r"source 's': stop_token_ids or logit_bias name \[100\], beyond vocab_size 100"):
        resolve(asked)


def test_an_answer_that_never_ends_is_refused() -> None:
    with pytest.raises(Fatal, match="set TOKENHAUL_INGEST_STOP_TOKEN_IDS"):
        resolve({}, end_ids=())


def test_facts_come_from_the_models_files(tmp_path: Path) -> None:
    config = {"vocab_size": 10, "max_position_embeddings": 20, "eos_token_id": 1}
    generation = {"eos_token_id": [1, 3], "temperature": 0.6, "top_k": 0, "top_p": None, "do_sample": False}
    read = facts(tmp_path, config, generation, stop_token_ids=[7])
    assert read == Model(
        vocab_size=10,
        context_length=20,
        end_ids=frozenset({1, 3, 7}),
        generation={"temperature": 0.6, "top_k": -1},
    )


def test_facts_of_a_model_with_vision_stand_in_text_config(tmp_path: Path) -> None:
    text = {"vocab_size": 10, "max_position_embeddings": 20, "eos_token_id": 4}
    read = facts(tmp_path, {"text_config": text})
    assert (read.vocab_size, read.context_length, read.end_ids) == (10, 20, frozenset({4}))


def test_settings_win(tmp_path: Path) -> None:
    read = facts(tmp_path, {"vocab_size": 10}, vocab_size=11, context_length=22)
    assert (read.vocab_size, read.context_length) == (11, 22)


@pytest.mark.parametrize(
    ("config", "variable"),
    [({"max_position_embeddings": 20}, "VOCAB_SIZE"), ({"vocab_size": 10}, "CONTEXT_LENGTH")],
)
def test_an_unknown_fact_names_the_setting_that_gives_it(tmp_path: Path, config: dict[str, Any], variable: str) -> None:
    with pytest.raises(Fatal, match=f"set TOKENHAUL_INGEST_{variable}"):
        facts(tmp_path, config)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"generation_config\.json: Expected `float` >= 0"):
        facts(tmp_path, {"vocab_size": 10, "max_position_embeddings": 20}, {"temperature": -1})
    with pytest.raises(Fatal, match=r"generation_config\.json cannot be read"):
        facts(tmp_path, {"vocab_size": 10, "max_position_embeddings": 20}, [1])
