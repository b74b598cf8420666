"""`tokenhaul export specforge|speculators|vocab|conversations --max-length N --out DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.dataset import card, cli, export_arguments, export_plan, place
from services.dataset import snapshot as snapshots
from services.dataset.card import Price
from services.dataset.conversations import Conversations
from services.dataset.export import Export, Format, Result
from services.dataset.export_plan import CARD, Plan
from services.dataset.reader import View
from services.dataset.specforge import CONTEXT_HEADROOM, SpecForge
from services.dataset.speculators import Speculators
from services.dataset.tokens import Tokens
from services.dataset.vocab import torch
from services.dataset.vocab_format import Vocab
from services.ingest import model
from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal, SettingsError
from services.kernel.overlap import Overlap

configure = export_arguments.configure
_NOT_ASKED = {"command", "format", "dataset", "out", "gpus", "gpu_hour_price", "snapshot", "since"}


@cli.reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Export, say what it cost; or say that it is done already."""
    if bool(arguments.gpus) != bool(arguments.gpu_hour_price):
        raise SettingsError("--gpus N and --gpu-hour-price P go together")
    card.need_charts()
    filters, format_ = export_arguments.filters(arguments), _format(arguments)
    exclude = Overlap.load(arguments.exclude) if arguments.exclude else None
    found = place.find(arguments.dataset)
    console = Console(highlight=False, soft_wrap=True)
    with export_plan.begun(arguments.out, _plan(arguments, found)) as plan:
        if (arguments.out / CARD).exists():
            export_plan.tidy(arguments.out)
            return _status(console, arguments.out, f"{arguments.out} is done already")
        view = View(found, plan.snapshot, plan.since)
        work = Export(view, filters, format_, arguments.out, exclude=exclude, tokens_per_file=arguments.tokens_per_file)
        price = Price(arguments.gpus, arguments.gpu_hour_price) if arguments.gpus else None
        notes = _notes(arguments)
        result = work.run(plan, lambda result: card.write(arguments.out, result, price, notes))
    _show(console, arguments, result, notes)
    return _status(console, arguments.out, f"{arguments.out / CARD}")


def _status(console: Console, out: Path, done: str) -> int:
    """The exit status of an export that is done, now or before: none without a row is a success."""
    empty = card.is_empty(out)
    console.print(f"{out} has no rows: all were left out, {out / CARD} says why" if empty else done)
    return 1 if empty else 0


def _plan(arguments: argparse.Namespace, found: place.Place) -> Plan:
    since = snapshots.load(found, arguments.since) if arguments.since else None
    asked = {name: value for name, value in vars(arguments).items() if name not in _NOT_ASKED}
    asked |= {name: str(value) for name, value in asked.items() if isinstance(value, Path)}
    asked |= {"exclude": [str(file) for file in arguments.exclude], "snapshot": arguments.snapshot}
    return Plan(
        format=arguments.format,
        asked=asked | {"since": arguments.since},
        snapshot=snapshots.load(found, arguments.snapshot) if arguments.snapshot else snapshots.now(found),
        since=since,
    )


def _format(arguments: argparse.Namespace) -> Format:
    """How to write, and everything that would be missing at the end missed now."""
    if arguments.format == "conversations":
        if arguments.tokenizer is None:
            raise SettingsError("--tokenizer DIR is required: ids become text here")
        tokens = Tokens(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
        return Conversations(tokens, key=arguments.key, open_tag=arguments.open_tag, close_tag=arguments.close_tag)
    draft, vocab_size = arguments.draft_vocab_size, _vocab_size(arguments)
    if arguments.format == "specforge":
        _check_context(arguments)
        if draft and not arguments.no_pt:
            torch("vocab_mapping.pt")
        return SpecForge(pt=not arguments.no_pt, draft_vocab_size=draft, vocab_size=vocab_size)
    if not arguments.no_pt:
        torch("token_freq.pt")
    if arguments.format == "vocab":
        return Vocab(draft, vocab_size or 0, pt=not arguments.no_pt)
    kinds = ("arrow", "jsonl") if arguments.kinds == "both" else (arguments.kinds,)
    return Speculators(kinds, token_freq=not arguments.no_pt, draft_vocab_size=draft, vocab_size=vocab_size)


def _vocab_size(arguments: argparse.Namespace) -> int | None:
    if not arguments.draft_vocab_size:
        return None
    if arguments.vocab_size:
        size: int = arguments.vocab_size
    elif arguments.tokenizer:
        size = _model(arguments.tokenizer).vocab_size
    else:
        raise SettingsError("--draft-vocab-size needs --vocab-size V, or --tokenizer DIR with the model's config.json")
    if arguments.draft_vocab_size > size:
        raise SettingsError(
            f"--draft-vocab-size {arguments.draft_vocab_size} is above the model's vocabulary of {size}"
        )
    return size


def _check_context(arguments: argparse.Namespace) -> None:
    """SpecForge's capture server must hold the longest row and its own headroom."""
    if arguments.tokenizer is None:
        return
    context, most = _model(arguments.tokenizer).context_length, arguments.max_length + CONTEXT_HEADROOM
    if most > context:
        raise SettingsError(
            f"--max-length {arguments.max_length}: SpecForge needs {CONTEXT_HEADROOM} more slots than that, and the "
            f"model's context has {context}: at most --max-length {context - CONTEXT_HEADROOM}"
        )


def _model(tokenizer: Path) -> model.Model:
    try:
        return model.load(IngestSettings(sources_file="", tokenizer=str(tokenizer)), tokenizer)
    except Fatal as error:
        raise SettingsError(str(error)) from error


def _notes(arguments: argparse.Namespace) -> list[str]:
    if arguments.format == "specforge":
        return [
            f"Train with `data.max_length: {arguments.max_length}`; the capture server needs a context of at least "
            f"{arguments.max_length + CONTEXT_HEADROOM} tokens."
        ]
    if arguments.format == "conversations":
        return ["**Lossy**: text, not tokens. Encoded again, a row may come back as other ids than the model's own."]
    return []


def _show(console: Console, arguments: argparse.Namespace, result: Result, notes: list[str]) -> None:
    """What was kept and what it cost."""
    stats = result.stats
    table = Table("left out because", "rows", "supervised tokens", title=f"The cost of {arguments.out}")
    table.add_row(f"cut to {arguments.max_length} tokens (kept)", f"{stats.cut:,}", f"{stats.lost_tokens:,}")
    for reason, count in sorted(result.left_out.items()):
        if count:
            tokens = result.left_out_tokens.get(reason)
            table.add_row(reason, f"{count:,}", "" if tokens is None else f"{tokens:,}")
    console.print(table)
    files = ", ".join(f"{len(names)} files of {split}" for split, names in result.files.items() if names) or "no files"
    kept = f"{stats.rows:,} rows, {stats.prompt_tokens:,} prompt tokens, {stats.output_tokens:,} supervised tokens"
    console.print(f"{kept} in {files}")
    if size := getattr(arguments, "draft_vocab_size", None):
        console.print(result.frequencies.coverage(size))
    for note in notes:
        console.print(note, markup=False)
