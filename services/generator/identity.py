"""Who answers at an engine's address, and whether it may have our prompts."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec

from services.generator.http import Http

_SECONDS = 30.0


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. A router knows the model, but neither version nor context of its workers."""

    model_path: str
    version: str | None = None
    weight_version: str | None = None
    max_model_len: int | None = None
    deterministic: bool = False
    router: bool = False


async def read(http: Http, url: str) -> Identity:
    """Ask. Routes that are not there are no harm; raises HttpError or TimeoutError when nobody answers,
    ValueError when the key is refused."""
    server = await _get(http, f"{url}/get_server_info", _Server)
    model = await _get(http, f"{url}/get_model_info", _Model)
    models = await _get(http, f"{url}/v1/models", _Models)
    served = models.data[0] if models.data else _Served()
    return Identity(
        model_path=model.model_path or server.model_path or served.id or "",
        version=server.version,
        weight_version=model.weight_version,
        max_model_len=served.max_model_len,
        deterministic=bool(server.enable_deterministic_inference),
        router=bool(server.router_manager),
    )


class _Server(msgspec.Struct):
    """Of /get_server_info."""

    model_path: str | None = None
    version: str | None = None
    enable_deterministic_inference: bool | None = None
    router_manager: Any = None


class _Model(msgspec.Struct):
    """Of /get_model_info."""

    model_path: str | None = None
    weight_version: str | None = None


class _Served(msgspec.Struct):
    id: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    """Of /v1/models."""

    data: list[_Served] = []


T = TypeVar("T", _Server, _Model, _Models)


def refusal(identity: Identity, label: str, model_path: str, *, router_retries_off: bool) -> str | None:
    """Why this engine gets none of our prompts; None if it may. `label` is the dataset's model, `model_path` what its
    engines call it (empty: the same, as far as the last part of the path goes)."""
    wrong = identity.model_path != model_path if model_path else _last(identity.model_path) != _last(label)
    if wrong:
        return (
            f"it serves {identity.model_path!r}, the dataset is of {model_path or label!r}: if that is the same model, "
            f"set TOKENHAUL_GENERATOR_MODEL_PATH={identity.model_path}"
        )
    if identity.router and not router_retries_off:
        return (
            "it is a router, which sends a request that killed one worker to the next: start it with "
            "--disable-retries and set TOKENHAUL_GENERATOR_ROUTER_RETRIES_OFF=true"
        )
    return None


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()


async def _get(http: Http, url: str, kind: type[T]) -> T:
    async with asyncio.timeout(_SECONDS):
        response = await http.get(url)
    if response.status in (401, 403):
        raise ValueError(f"{url} answered {response.status}: is TOKENHAUL_GENERATOR_API_KEY right?")
    if response.status != 200:
        return kind()
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return kind()  # another server's page: what is missing then is refused
