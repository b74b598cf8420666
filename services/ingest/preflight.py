"""Before the first prompt of a source: does its way of tokenizing give what plain transformers gives?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.ingest import model, places, request
from services.ingest.asks import Asks
from services.ingest.lines import Line, Mark
from services.ingest.prompts import PromptMaker, Rendered
from services.ingest.settings import IngestSettings
from services.ingest.sources import Source, Sources
from services.ingest.stored import Broken
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Fatal, Reject, SettingsError
from services.kernel.overlap import Overlap

log = logging.getLogger("tokenhaul.ingest")

RECORDS = 32
LOOKED_AT = 1024  # lines of a file, when few of them can be asked
_PROBE = [{"role": "user", "content": "Hello"}]


def prepare(settings: IngestSettings, declared: Sources, label: str) -> dict[str, PromptMaker]:
    """The makers of all sources, for the model of this label, tried on what the files hold. Raises Fatal."""
    facts, tokenizer = model.load(settings), ChatTokenizer(settings.tokenizer)
    overlaps: dict[tuple[Any, ...], Overlap] = {}
    makers = {}
    for source in declared.sources:
        maker = PromptMaker(
            request.resolve(source, label, facts, tokenizer),
            tokenizer,
            store_messages=settings.store_messages,
            overlap=_overlap(source, declared.folder, overlaps),
        )
        prove_template(maker)
        prove_source(maker, source, declared)
        makers[source.name] = maker
    return makers


def _overlap(source: Asks, folder: Path, loaded: dict[tuple[Any, ...], Overlap]) -> Overlap | None:
    """What the source's prompts must not overlap with; files that several sources name are read once."""
    if not source.exclude:
        return None
    key = (*source.exclude, source.exclude_words)
    if key not in loaded:
        try:
            loaded[key] = Overlap.load([folder / file for file in source.exclude], source.exclude_words)
        except SettingsError as error:
            raise SettingsError(f"source {source.name!r}: exclude: {error}") from error
    return loaded[key]


def prove_template(maker: PromptMaker) -> None:
    """Raises Fatal for a template that does not open the answer: the model would continue the user's turn."""
    source, tokenizer = maker.request.source, maker.tokenizer
    kwargs = source.chat_template_kwargs
    try:
        with_prompt = tokenizer.render(_PROBE, None, kwargs)
        without = tokenizer.render(_PROBE, None, kwargs, generation_prompt=False)
    except Reject as reject:
        raise Fatal(f"source {source.name!r}: the chat template cannot render a user's turn: {reject.detail}") from None
    if with_prompt == without:
        raise _no_generation_prompt(source, "a user's turn")


def prove(maker: PromptMaker, file: str, lines: Sequence[Line]) -> int:
    """Hold the records of `lines` against plain transformers, one by one; how many there were. One proves the maker.

    Raises Fatal for the first that differs or has no generation prompt. Refused records are not looked at."""
    source, tokenizer = maker.request.source, maker.tokenizer
    asked = [item for item in maker.render(lines) if isinstance(item, Rendered)]
    rendered = [item for item in asked if item.conversation.ids is None]  # what is given as ids has nothing to differ
    for item, ids in zip(rendered, tokenizer.encode([item.text for item in rendered]), strict=True):
        chat, kwargs = item.conversation, source.chat_template_kwargs
        where = f"{file}, line {item.line.row}"
        if tokenizer.plain(chat.messages, chat.tools, kwargs) != ids:
            raise Fatal(
                f"source {source.name!r}: {where}: encoding the rendered text gives other ids than the tokenizer's own "
                "apply_chat_template. The prompts would not be those the model is served with"
            )
        # After a tool's result some templates (DeepSeek-V3.1) go on within the assistant's turn: nothing to open.
        if chat.messages[-1]["role"] == "user":
            bare = tokenizer.render(chat.messages, chat.tools, kwargs, generation_prompt=False)
            if bare == item.text:
                raise _no_generation_prompt(source, where)
    maker.proven = maker.proven or bool(asked)
    return len(asked)


def prove_source(maker: PromptMaker, source: Source, declared: Sources) -> int:
    """Look at the first records of a source's files, as far as there are any; how many there were."""
    count = 0
    entries = places.find(source.files, declared.folder, declared.roots).entries
    for name, entry in entries.items():
        if count >= RECORDS:
            break
        mark, more, input = Mark(), True, entry.make()
        try:
            while more and count < RECORDS and mark.row < LOOKED_AT:
                taken = input.read(mark, max_lines=RECORDS - count)
                count += prove(maker, name, taken.lines)
                more, mark = taken.mark != mark, taken.mark
        except (OSError, Broken):
            continue  # whoever reads it will say so
        finally:
            input.close()
    log.info(
        "source %s: %d files; %d records tokenized both ways agree", source.name, len(entries), count,
        extra={"action": "preflight", "records": count},
    )  # fmt: skip
    return count


def _no_generation_prompt(source: Asks, where: str) -> Fatal:
    return Fatal(
        f"source {source.name!r}: add_generation_prompt adds nothing to the rendered prompt ({where}): the template "
        "has no generation prompt. Put a template that opens the assistant's turn into the tokenizer's directory"
    )
