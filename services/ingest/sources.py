"""The sources file: what is to be asked, and which files hold it.

    sources:
      - name: chats
        files: [chats/*.jsonl, /data/incoming]     # patterns and folders; relative ones start where this file is
        max_new_tokens: 4096

docs/formats.md lists every key.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from services.ingest.sampling import SET_ELSEWHERE, Sampling
from services.kernel.errors import SettingsError

SUFFIX = ".jsonl"
Format = Literal["auto", "messages", "sharegpt", "alpaca", "glaive", "input_output", "prompt"]

_TagIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
_TagText = Annotated[str, Meta(pattern=r"\S")]


class Tags(msgspec.Struct, frozen=True):
    """The tags of a reasoning part, as text or as token ids."""

    open: _TagText | _TagIds
    close: _TagText | _TagIds


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One source: its files, and what is asked of every record in them."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$")]
    files: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    max_new_tokens: Annotated[int, Meta(ge=1)]
    format: Format = "auto"
    turns: Literal["last"] = "last"
    samples: Annotated[int, Meta(ge=1)] = 1
    sampling: Literal["model"] | Sampling = "model"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning: Literal["auto", "none"] | Tags = "auto"
    tools: Literal["require", "ignore"] = "require"
    revision: Annotated[int, Meta(ge=0)] = 0

    @property
    def asked_sampling(self) -> Sampling:
        """What the source itself says about sampling."""
        return Sampling() if isinstance(self.sampling, str) else self.sampling


class Sources(msgspec.Struct, frozen=True):
    """All sources, and the folder their relative patterns start from."""

    folder: Path
    sources: list[Source]


class Found(msgspec.Struct, frozen=True):
    """The files of a source by name (as its pattern spells it), and names in its folders that are passed over."""

    files: dict[str, Path]
    passed_over: list[str]


T = TypeVar("T")


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
            source = _source(item)
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


def _source(item: Any) -> Source:
    if not isinstance(item, dict):
        raise ValueError(f"must be a mapping of keys, not {item!r}")
    # Dates become the text they were written as: a template would be given an object it cannot print.
    item = _without_nulls(msgspec.to_builtins(item, str_keys=True), Source, "key")
    if isinstance(item.get("sampling"), dict):
        for name, reason in SET_ELSEWHERE.items():
            if name in item["sampling"]:
                raise ValueError(f"sampling.{name} cannot be set: {reason}")
        item["sampling"] = _without_nulls(item["sampling"], Sampling, "sampling parameter")
    if isinstance(item.get("reasoning"), dict):
        item["reasoning"] = _without_nulls(item["reasoning"], Tags, "key of reasoning")
    source = msgspec.convert(item, Source)
    if (source.asked_sampling.min_new_tokens or 0) > source.max_new_tokens:
        raise ValueError("sampling.min_new_tokens is above max_new_tokens")
    return source


def _without_nulls(given: Mapping[Any, Any], known: type[msgspec.Struct], what: str) -> dict[str, Any]:
    """What was given, null meaning absent. Raises ValueError for a name that `known` has not."""
    for name in given:
        if name not in known.__struct_fields__:
            raise ValueError(f"unknown {what} {name!r}; allowed are {', '.join(known.__struct_fields__)}")
    return {name: value for name, value in given.items() if value is not None}


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
