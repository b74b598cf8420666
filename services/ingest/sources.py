"""The sources file: what is to be asked, and which files hold it.

    sources:
      - name: chats
        files: [chats/*.jsonl, /data/incoming]     # patterns and folders; relative ones start where this file is
        max_new_tokens: 4096

docs/sources.md and docs/formats.md list every key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from services.ingest import asks, places
from services.ingest.asks import Asks
from services.kernel.errors import SettingsError

_MAX_NODES, _MAX_DEPTH = 100_000, 50


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only this share of the records, chosen by their own bytes: the same ones whatever the order and the files."""

    fraction: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0)] = 0


class Source(Asks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source: where its records are, how many of them are taken, and what is asked of each."""

    files: list[Annotated[str, Meta(min_length=1)]] = msgspec.field(default_factory=list)
    http: bool = False
    enabled: bool = True
    weight: Annotated[float, Meta(gt=0)] = 1.0
    limit: Annotated[int, Meta(ge=1)] | None = None
    sample: Sample | None = None
    max_bad_ratio: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_bad_in_a_row: Annotated[int, Meta(ge=1)] = 1000


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sources file as a whole, for its JSON Schema."""

    sources: Annotated[list[Source], Meta(min_length=1)]


class Sources(msgspec.Struct, frozen=True):
    """The sources that are enabled, the folder their relative patterns start from, the roots they must stay in."""

    folder: Path
    sources: list[Source]
    roots: list[str] = []


def load(path: str, roots: Sequence[str] = ()) -> Sources:
    """Read the sources file. Raises SettingsError naming the file, the source, the key and what is allowed."""
    try:
        given = _yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # a date that is none is a ValueError
        raise _refusal(path, f"is not YAML: {error}") from error
    if not isinstance(given, dict) or set(given) != {"sources"} or not isinstance(given["sources"], list):
        raise _refusal(path, "must hold one key, `sources`, with a list of sources")
    folder = Path(path).absolute().parent
    problems: list[str] = []
    sources: list[Source] = []
    for number, item in enumerate(given["sources"]):
        name = item.get("name") if isinstance(item, dict) else None
        try:
            source = asks.convert(item, Source)
            if source.name in {other.name for other in sources}:
                raise ValueError("another source has this name")
            if not source.files and not source.http:
                raise ValueError("it has neither `files` nor `http: true`: nothing could come of it")
            if source.enabled:
                places.check(source.files, folder, roots)
            sources.append(source)
        except ValueError as error:
            problems.append(f"source {name or number + 1!r}: {error}")
    if problems or not sources:
        raise _refusal(path, *(problems or ["declares no source"]))
    return Sources(folder, [source for source in sources if source.enabled], list(roots))


def _yaml(text: str) -> Any:
    """What `text` says. Aliases are counted as often as what they stand for: ten lines of them make a billion."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in open_):
                raise ValueError(f"*{event.anchor} stands inside of &{event.anchor}")
            total += sizes.get(str(event.anchor), 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, total))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            sizes |= {anchor: total - before} if anchor else {}
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            sizes[event.anchor] = 1
        total += 1
        if total > _MAX_NODES or len(open_) > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_NODES} values, or {_MAX_DEPTH} in one another")
    return yaml.safe_load(text)


def _refusal(path: str, *problems: str) -> SettingsError:
    return SettingsError("\n".join(f"TOKENHAUL_INGEST_SOURCES_FILE {path}: {problem}" for problem in problems))
