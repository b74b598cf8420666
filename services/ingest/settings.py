"""What `tokenhaul ingest` is told by the environment. What it reads is declared in the sources file: see sources.py."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from services.kernel.errors import SettingsError
from services.kernel.masking import masked
from services.kernel.settings import Secret, Settings

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class IngestSettings(Settings, frozen=True, kw_only=True):
    """The model whose prompts are made, and how they are read."""

    PREFIX: ClassVar[str] = "TOKENHAUL_INGEST_"

    sources_file: Annotated[str, Meta(description="YAML file that declares the sources (docs/sources.md)")]
    tokenizer: Annotated[
        str,
        Meta(description="directory of the model's tokenizer, config.json and generation_config.json; or its hub id"),
    ]
    tokenizer_revision: Annotated[str, Meta(description="with a hub id: the commit to take the files from")] = ""
    tokenizer_cache: Annotated[
        str, Meta(description="with a hub id: directory to keep the files in; empty: the hub client's own")
    ] = ""
    tokenizer_processes: Annotated[
        int, Meta(ge=0, description="processes of a tokenizer written in Python (Kimi's); 0: one a core")
    ] = 0
    trust_remote_code: Annotated[bool, Meta(description="run the Python code that comes with the tokenizer")] = False
    date: Annotated[
        str,
        Meta(
            pattern=r"^(\d{4}-\d{2}-\d{2})?$",
            description="the day chat templates are told that print today's; empty: the day the dataset was created",
        ),
    ] = ""
    vocab_size: Annotated[int, Meta(ge=0, description="ids the model knows; 0: what config.json says")] = 0
    context_length: Annotated[
        int, Meta(ge=0, description="tokens of prompt and answer together; 0: what config.json says")
    ] = 0
    stop_token_ids: Annotated[
        list[int], Meta(description="ids that end an answer, beside the end ids of the model's own files")
    ] = msgspec.field(default_factory=list)
    engine: Annotated[
        str,
        Meta(
            description="base URL of an engine whose /v1/tokenize must agree with the tokenizer before it starts",
            extra={"secret_in": "TOKENHAUL_INGEST_ENGINE_API_KEY"},
        ),
    ] = ""
    engine_api_key: Annotated[Secret, Meta(description="its --api-key; sent as a bearer token, shown nowhere")] = (
        Secret()
    )
    store_messages: Annotated[
        bool, Meta(description="keep messages and tools beside the ids, so that prompts can be rendered again")
    ] = True
    batch_records: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="prompts that are tokenized together and, up to 2,000 and 16 MiB, share a transaction",
        ),
    ] = 512
    roots: Annotated[
        list[str],
        Meta(
            description="directories (and s3:// prefixes) that sources must stay in, links followed; empty: any",
            extra={"secret_in": "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY"},
        ),
    ] = msgspec.field(default_factory=list)
    backlog: Annotated[
        int, Meta(ge=0, description="reading pauses while so many prompts wait for the generators; 0: never")
    ] = 1_000_000
    http_host: Annotated[str, Meta(description="address of POST /v1/prompts; other than loopback needs a token")] = (
        "127.0.0.1"
    )
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of POST /v1/prompts; 0: not served")] = 0
    http_token: Annotated[Secret, Meta(description="bearer token of POST /v1/prompts, and of `tokenhaul push`")] = (
        Secret()
    )
    http_max_body_bytes: Annotated[int, Meta(ge=1024, description="a request's body may have so many bytes")] = (
        268_435_456
    )
    scan_seconds: Annotated[
        float, Meta(gt=0, le=60, description="how often files are looked for and looked at for new lines")
    ] = 5.0


def check(settings: IngestSettings) -> None:
    """What no single setting shows. Raises SettingsError."""
    if not Path(settings.tokenizer).is_dir():
        _check_hub_id(settings)
    if settings.http_port and not settings.http_token and not _is_loopback(settings.http_host):
        raise SettingsError(
            f"TOKENHAUL_INGEST_HTTP_HOST={settings.http_host!r} is open to others: set TOKENHAUL_INGEST_HTTP_TOKEN"
        )


def _check_hub_id(settings: IngestSettings) -> None:
    variable = "TOKENHAUL_INGEST_TOKENIZER"
    if not _HUB_ID.fullmatch(settings.tokenizer):
        raise SettingsError(
            f"{variable}={masked(settings.tokenizer)!r} is no directory, and no id of a model on the hub"
        )
    if not settings.tokenizer_revision:
        raise SettingsError(
            f"{variable}={settings.tokenizer!r} is no directory; to take it from the hub, set {variable}_REVISION to "
            "the commit you mean: what a branch holds may change within a dataset"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
