"""Before the first prompt: does every source ask what it seems to, in the ids plain transformers gives?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.ingest import places, probes
from services.ingest.asks import Asks
from services.ingest.lines import Line, Mark
from services.ingest.prompts import PromptMaker, Rendered
from services.ingest.sources import Source, Sources
from services.ingest.stored import Broken
from services.ingest.workshop import Workshop
from services.kernel.errors import Fatal, Reject

log = logging.getLogger("tokenhaul.ingest")

RECORDS = 32
LOOKED_AT = 1024  # lines of a file, when few of them can be asked
_PROBE = [{"role": "user", "content": "Hello"}]


def prepare(workshop: Workshop, declared: Sources) -> dict[str, PromptMaker]:
    """The makers of all sources, tried on what the files hold; the engine too, if one is set. Raises Fatal."""
    makers = {}
    for source in declared.sources:
        maker = workshop.maker(source, declared.folder)
        prove_template(maker)
        prove_source(maker, source, declared)
        makers[source.name] = maker
    engine = workshop.settings.engine
    if engine:
        asyncio.run(probes.prove_engine(engine, workshop.settings.engine_api_key, probes.make(makers.values())))
    return makers


def prove_template(maker: PromptMaker) -> None:
    """Raises Fatal for a template that does not open the answer: the model would continue the user's turn."""
    source, tokenizer = maker.request.source, maker.tokenizer
    kwargs = maker.request.chat_template_kwargs
    try:
        with_prompt = tokenizer.render(_PROBE, None, kwargs)
        without = tokenizer.render(_PROBE, None, kwargs, generation_prompt=False)
    except Reject as reject:
        raise Fatal(f"source {source.name!r}: the chat template cannot render a user's turn: {reject.detail}") from None
    if with_prompt == without:
        raise _no_generation_prompt(source, "a user's turn")
    _check_ids(maker, tokenizer.ids(with_prompt))


def prove(maker: PromptMaker, file: str, lines: Sequence[Line]) -> int:
    """Hold the records of `lines` against plain transformers, one by one; how many there were. One proves the maker.

    Raises Fatal for the first that differs or has no generation prompt. Refused records are not looked at."""
    source, tokenizer = maker.request.source, maker.tokenizer
    asked = [item for item in maker.render(lines) if isinstance(item, Rendered)]
    rendered = [item for item in asked if item.conversation.ids is None]  # what is given as ids has nothing to differ
    for item, ids in zip(rendered, tokenizer.encode([item.text for item in rendered]), strict=True):
        _check_ids(maker, ids)
        chat, kwargs = item.conversation, maker.request.chat_template_kwargs
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
    maker.example = maker.example or next(iter(asked), None)
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


def _check_ids(maker: PromptMaker, ids: list[int]) -> None:
    maker.request.check_ids(ids)
    bos = maker.tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise Fatal(
            f"source {maker.request.source.name!r}: prompts begin with BOS twice (id {bos}): chat template and "
            "tokenizer both write one. Take it out of one of them: the model has seen one"
        )


def _no_generation_prompt(source: Asks, where: str) -> Fatal:
    return Fatal(
        f"source {source.name!r}: add_generation_prompt adds nothing to the rendered prompt ({where}): the template "
        "has no generation prompt. Put a template that opens the assistant's turn into the tokenizer's directory"
    )
