"""`tokenhaul ingest FILE...`: these files, once, without a sources file.

It is the one ingest there may be for its topics, as the service is: one that runs would be fenced off by it. While a
service runs, `tokenhaul push` hands it files.
"""

from __future__ import annotations

import argparse
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.ingest import asks, places, sources
from services.ingest.service import Ingest
from services.ingest.settings import IngestSettings, check
from services.ingest.sources import Source, Sources
from services.kernel.errors import SettingsError
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import load


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul ingest`, all of them optional."""
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="read these files once and end: one source each, named after its file, or one .yaml that declares sources "
        "(docs/sources.md). Not while the service runs: see `tokenhaul push`",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="with FILE: longest answer, in tokens")


def environment(files: Sequence[Path], environ: Mapping[str, str]) -> dict[str, str]:
    """What a one-off needs of the environment, with what it can do without."""
    given = {"TOKENHAUL_RUN_ID": uuid.uuid4().hex, **environ}
    return {**given, "TOKENHAUL_INGEST_SOURCES_FILE": str(files[0])}


def make(files: Sequence[Path], max_new_tokens: int | None, environ: Mapping[str, str]) -> Ingest:
    """The service for `files` alone. Raises SettingsError."""
    settings, kafka = load(IngestSettings, environ), load(KafkaSettings, environ)
    check(settings)
    if is_declaration(files):
        declared = sources.load(str(files[0]), settings.roots)
    else:
        items = [asks.convert(item, Source) for item in of_files(files, max_new_tokens)]
        for item in items:
            try:
                places.check(item.files, Path.cwd(), settings.roots)
            except ValueError as error:
                raise SettingsError(str(error)) from error
        declared = Sources(Path.cwd(), items, settings.roots)
    return Ingest(settings, Kafka(kafka), declared, strict=True)


def is_declaration(files: Sequence[Path]) -> bool:
    """Whether this is one YAML file that declares sources."""
    return [file.suffix for file in files] in ([".yaml"], [".yml"])


def of_files(files: Sequence[Path], max_new_tokens: int | None) -> list[dict[str, Any]]:
    """One source for each of `files`, as a sources file would declare it. Raises SettingsError."""
    if missing := [str(file) for file in files if not file.exists()]:
        raise SettingsError(f"no such file: {', '.join(missing)}")
    if unknown := [str(file) for file in files if not (file.is_dir() or places.kind_of(file.name))]:
        raise SettingsError(f"no file of prompts by its name: {', '.join(unknown)}; it must end in {places.KINDS}")
    if max_new_tokens is None:
        raise SettingsError("--max-new-tokens N is required: how long may an answer be?")
    if max_new_tokens < 1:
        raise SettingsError(f"--max-new-tokens {max_new_tokens} is not at least 1")
    return [
        {"name": name, "files": [str(file.resolve())], "max_new_tokens": max_new_tokens}
        for name, file in zip(_names(files), files, strict=True)
    ]


def _names(files: Sequence[Path]) -> list[str]:
    """A name for each source: the file's, with a number behind where it would stand twice."""
    names: list[str] = []
    for file in files:
        stem = file.name.partition(".")[0] if places.kind_of(file.name) else file.stem
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-") or "source"
        taken = sum(re.fullmatch(rf"{re.escape(stem)}(-\d+)?", name) is not None for name in names)
        names.append(f"{stem}-{taken + 1}" if taken else stem)
    return names
