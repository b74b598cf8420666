"""What the model's own files say: how many ids it knows, how long a sequence may be, what ends one, how to sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from services.ingest.sampling import FROM_GENERATION_CONFIG, Sampling
from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal

# In the order SGLang looks; a rope scaling factor is left out, because too short a context harms nobody.
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`generation` holds the values of generation_config.json that SGLang's chat route applies."""

    vocab_size: int
    context_length: int
    end_ids: frozenset[int]
    generation: dict[str, Any]


def load(settings: IngestSettings, folder: Path) -> Model:
    """What config.json and generation_config.json in `folder` say; settings win. Raises Fatal for what is not said."""
    config, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
    parts = [config, config.get("text_config") or {}]
    return Model(
        vocab_size=settings.vocab_size or _number(parts, ("vocab_size",), folder, "VOCAB_SIZE"),
        context_length=settings.context_length or _number(parts, _CONTEXT_KEYS, folder, "CONTEXT_LENGTH"),
        end_ids=frozenset(settings.stop_token_ids).union(*(_end_ids(part) for part in (*parts, generation))),
        generation=_generation(generation, folder),
    )


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise Fatal(f"{path} cannot be read: {error}") from error


def _number(parts: list[dict[str, Any]], keys: tuple[str, ...], folder: Path, variable: str) -> int:
    for part in parts:
        for key in keys:
            if isinstance(part.get(key), int):
                return int(part[key])
    raise Fatal(f"config.json in {folder} has no {' or '.join(keys)}: set TOKENHAUL_INGEST_{variable}")


def _end_ids(config: dict[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _generation(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    values = {name: config[name] for name in FROM_GENERATION_CONFIG if config.get(name) is not None}
    try:
        return msgspec.convert(values, Sampling).given()
    except msgspec.ValidationError as error:
        raise Fatal(f"{folder / 'generation_config.json'}: {error}, which SGLang would refuse") from error
