"""`tokenhaul check`: all that ingest proves before its first prompt, and one prompt of each source to look at.

Needs the settings of ingest, and no Kafka.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterator

from schemas.prompts import Reasoning
from services.ingest import preflight, sources
from services.ingest.prompts import PromptMaker
from services.ingest.record import Own
from services.ingest.settings import IngestSettings, check
from services.ingest.workshop import Workshop
from services.kernel import logs
from services.kernel.errors import Reject, TokenhaulError
from services.kernel.settings import load

_TAIL = 12
_ENDS = 24
_HELLO = [{"role": "user", "content": "Hello"}]


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul check`."""
    parser.add_argument("--engine", metavar="URL", help="an engine whose /v1/tokenize must agree")


def command(arguments: argparse.Namespace) -> int:
    """Prove and show; 0 when ingest would start."""
    logs.configure("human", "info")
    try:
        given = {"TOKENHAUL_INGEST_ENGINE": arguments.engine} if arguments.engine else {}
        settings = load(IngestSettings, os.environ | given)
        check(settings)
        declared = sources.load(settings.sources_file, settings.roots)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        makers = preflight.prepare(Workshop(settings, "check", today), declared)
    except TokenhaulError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    for maker in makers.values():
        print(*shown(maker), "", sep="\n")
    return 0


def shown(maker: PromptMaker) -> Iterator[str]:
    """A source's first prompt, line by line: where it is from, its text, its ids, how it is asked."""
    request, tokenizer, example = maker.request, maker.tokenizer, maker.example
    yield f"source {request.source.name}"
    if example is None:
        yield "  holds no record that can be asked yet; this is how a user's Hello would be"
        text, given, own = tokenizer.render(_HELLO, None, request.chat_template_kwargs), None, Own()
    else:
        yield f"  line {example.line.row}, turn {example.conversation.turn}, conversation {example.group}"
        text, given, own = example.text, example.conversation.ids, example.record.own
    ids = given or tokenizer.ids(text)
    yield f"  prompt, {len(ids)} ids:"
    yield from (f"  | {line}" for line in text.split("\n"))
    yield f"  ids: {_short(ids)}"
    yield f"  tail: {' '.join(f'{id} {tokenizer.decode([id])!r}' for id in ids[-_TAIL:])}"
    yield f"  reasoning: {_reasoning(request.reasoning.state(text) if request.reasoning else None)}"
    if request.chat_template_kwargs:
        yield f"  chat_template_kwargs: {request.chat_template_kwargs}"
    try:
        sampling, clamped = request.sampling(ids, own)
        yield f"  sampling: {sampling}{' (max_new_tokens is clamped to the context)' if clamped else ''}"
    except Reject as reject:
        yield f"  refused: {reject}"


def _short(ids: list[int]) -> str:
    if len(ids) <= 2 * _ENDS:
        return str(ids)
    return f"{str(ids[:_ENDS])[:-1]}, ... {str(ids[-_ENDS:])[1:]}"


def _reasoning(state: Reasoning | None) -> str:
    if state is None:
        return "none"
    how = "opened by the prompt" if state.opened else "not opened by the prompt: the answer may open it"
    return f"{how}; from {state.open} to {state.close}"
