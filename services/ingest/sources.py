"""The sources file: what is to be asked, and which files hold it.

    sources:
      - name: chats
        files: [chats/*.jsonl, /data/incoming]     # patterns and folders; relative ones start where this file is
        max_new_tokens: 4096

docs/formats.md lists every key.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from services.ingest import asks
from services.ingest.asks import Asks
from services.kernel.errors import SettingsError

SUFFIX = ".jsonl"


class Source(Asks, frozen=True, kw_only=True):
    """One source: its files, and what is asked of every record in them."""

    files: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class Sources(msgspec.Struct, frozen=True):
    """All sources, and the folder their relative patterns start from."""

    folder: Path
    sources: list[Source]


class Found(msgspec.Struct, frozen=True):
    """The files of a source by name (as its pattern spells it), and names in its folders that are passed over."""

    files: dict[str, Path]
    passed_over: list[str]


def load(path: str) -> Sources:
    """Read the sources file. Raises SettingsError naming the file, the source, the key and what is allowed."""
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
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
            _check_files(source, folder)
            sources.append(source)
        except ValueError as error:
            problems.append(f"source {name or number + 1!r}: {error}")
    if problems or not sources:
        raise _refusal(path, *(problems or ["declares no source"]))
    return Sources(folder, sources)


def find_files(source: Source, folder: Path) -> Found:
    """Look for the source's files now; each once, in the order of its patterns, sorted within one."""
    files: dict[str, Path] = {}
    passed_over: list[str] = []
    for pattern in source.files:
        if (folder / pattern).is_file():
            names = [pattern]
        elif (folder / pattern).is_dir():
            inside = sorted(glob.glob("**/*", root_dir=folder / pattern, recursive=True))
            names = [str(Path(pattern) / name) for name in inside if not (folder / pattern / name).is_dir()]
        else:
            names = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
        passed_over += [name for name in names if not _is_read(name)]
        known = set(files.values())
        files |= {name: folder / name for name in names if _is_read(name) and folder / name not in known}
    return Found(files, passed_over)


def _is_read(name: str) -> bool:
    # A name in no known encoding could be written to no topic.
    return name.endswith(SUFFIX) and not any("\ud800" <= character <= "\udfff" for character in name)


def _check_files(source: Source, folder: Path) -> None:
    for pattern in source.files:
        path = folder / pattern
        if path.is_dir():
            continue
        if not pattern.endswith(SUFFIX):
            raise ValueError(f"files: {pattern!r} is no folder and does not end in {SUFFIX}, the one kind that is read")
        if not glob.has_magic(pattern) and not path.exists():
            raise ValueError(f"files: there is no {path}")


def _refusal(path: str, *problems: str) -> SettingsError:
    return SettingsError("\n".join(f"TOKENHAUL_INGEST_SOURCES_FILE {path}: {problem}" for problem in problems))
