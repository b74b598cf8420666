"""What `tokenhaul ingest` is told by the environment. What it reads is declared in the sources file: see sources.py."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from services.kernel.settings import Settings


class IngestSettings(Settings, frozen=True, kw_only=True):
    """The model whose prompts are made, and how they are read."""

    PREFIX: ClassVar[str] = "TOKENHAUL_INGEST_"

    sources_file: Annotated[str, Meta(description="YAML file that declares the sources (docs/sources.md)")]
    tokenizer: Annotated[
        str, Meta(description="directory of the model's tokenizer, config.json and generation_config.json")
    ]
    vocab_size: Annotated[int, Meta(ge=0, description="ids the model knows; 0: what config.json says")] = 0
    context_length: Annotated[
        int, Meta(ge=0, description="tokens of prompt and answer together; 0: what config.json says")
    ] = 0
    stop_token_ids: Annotated[
        list[int], Meta(description="ids that end an answer, beside the end ids of the model's own files")
    ] = msgspec.field(default_factory=list)
    store_messages: Annotated[
        bool, Meta(description="keep messages and tools beside the ids, so that prompts can be rendered again")
    ] = True
    batch_records: Annotated[
        int, Meta(ge=1, le=10_000, description="prompts that are tokenized together and share a transaction")
    ] = 512
    roots: Annotated[
        list[str],
        Meta(description="directories (and s3:// prefixes) that sources must stay in, links followed; empty: any"),
    ] = msgspec.field(default_factory=list)
    scan_seconds: Annotated[
        float, Meta(gt=0, le=60, description="how often files are looked for and looked at for new lines")
    ] = 5.0
