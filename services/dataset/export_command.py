"""`tokenhaul export specforge|speculators|vocab|conversations --max-length N --out DIR`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.dataset import card, cli, export, place, where
from services.dataset import snapshot as snapshots
from services.dataset.card import Price
from services.dataset.conversations import Conversations
from services.dataset.export import Export, Format, Plan, Result
from services.dataset.reader import View
from services.dataset.selection import Filters, parse_shares
from services.dataset.specforge import CONTEXT_HEADROOM, SpecForge
from services.dataset.speculators import Speculators
from services.dataset.tokens import Tokens
from services.dataset.vocab import torch
from services.dataset.vocab_format import Vocab
from services.dataset.where import Term, Where
from services.ingest import model
from services.ingest.settings import IngestSettings
from services.kernel.errors import Fatal, SettingsError
from services.kernel.overlap import Overlap

_NOT_ASKED = {"command", "format", "dataset", "out", "gpus", "gpu_hour_price", "snapshot", "since"}


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul export`."""
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    specforge = formats.add_parser("specforge", help="pre-tokenised JSON lines for SpecForge's data.prompts_path")
    speculators = formats.add_parser("speculators", help="speculators' arrow directory, and JSON lines")
    vocab = formats.add_parser("vocab", help="a draft vocabulary (t2d, d2t) and token frequencies alone")
    conversations = formats.add_parser("conversations", help="text, for trainers that take nothing else (lossy)")
    for each in (specforge, speculators, vocab, conversations):
        _add_rows(each)
        _add_output(each)
    for each in (specforge, speculators, vocab):
        each.add_argument("--draft-vocab-size", type=cli.positive, metavar="N", required=each is vocab,
                          help="make the mapping of a draft vocabulary of N tokens")  # fmt: skip
        each.add_argument("--vocab-size", type=cli.positive, metavar="V",
                          help="ids the model knows (default: what config.json in --tokenizer says)")  # fmt: skip
        each.add_argument("--no-pt", action="store_true", help="do without .pt files, for which PyTorch is needed")
    specforge.add_argument("--dflash", action="store_true",
                           help="for DFlash and the like: rows need two supervised tokens")  # fmt: skip
    speculators.add_argument("--as", dest="kinds", choices=("both", "arrow", "jsonl"), default="both",
                             help="what to write (default %(default)s)")  # fmt: skip
    conversations.add_argument("--key", choices=("conversations", "messages"), default="conversations",
                               help="what the list of messages is called (default %(default)s)")  # fmt: skip
    conversations.add_argument("--open-tag", default="<think>", help="of the reasoning (default %(default)s)")
    conversations.add_argument("--close-tag", default="</think>", help="of the reasoning (default %(default)s)")
    conversations.add_argument("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer")


def _add_rows(parser: argparse.ArgumentParser) -> None:
    rows = parser.add_argument_group("which rows")
    rows.add_argument("--max-length", type=cli.positive, required=True, metavar="N", help="longest row, in tokens")
    rows.add_argument("--too-long", choices=("cut", "drop"), default="cut", help="rows longer than that (default: cut)")
    rows.add_argument("--snapshot", metavar="NAME", help="the dataset as it was then (default: as it is now)")
    rows.add_argument("--since", metavar="NAME", help="only rows that came after this snapshot")
    rows.add_argument("--source", action="append", default=[], metavar="NAME", help="only these sources (repeat)")
    rows.add_argument("--finish-reason", action="append", default=[], choices=("stop", "length"), help="only these")
    rows.add_argument("--reasoning-closed", action="store_true", help="no row whose reasoning was never closed")
    rows.add_argument("--min-output", type=cli.positive, default=1, metavar="N", help="tokens of an answer, at least")
    rows.add_argument("--max-output", type=cli.positive, metavar="N", help="tokens of an answer, at most")
    rows.add_argument("--max-prompt", type=cli.positive, metavar="N", help="tokens of a prompt, at most")
    rows.add_argument("--max-repetition", type=cli.share, metavar="X",
                      help="share of an answer in repeated n-grams, at most (0 to 1): loops are near 1")  # fmt: skip
    rows.add_argument("--keep-empty", action="store_true", help="also answers that are nothing but their stop token")
    rows.add_argument("--where", action="append", default=[], metavar="EXPR", help="any other condition (repeat)")
    rows.add_argument("--exclude", action="append", default=[], type=Path, metavar="FILE",
                      help="no prompt that is, or shares 13 words in a row with, a text of this benchmark")  # fmt: skip
    rows.add_argument("--sample", type=cli.share, default=1.0, metavar="X", help="a share of the rows, by hash")
    rows.add_argument("--cap", action="append", default=[], metavar="[NAME=]N", help="at most N rows of each source")
    rows.add_argument("--ratio", action="append", default=[], metavar="NAME=X",
                      help="mix sources X to X to ..., as many rows as that allows; others are left out")  # fmt: skip
    rows.add_argument("--seed", type=int, default=0, help="of all that is random (default %(default)s)")
    rows.add_argument("--eval", type=cli.share, default=0.0, metavar="X",
                      help="share of the conversations to put aside, whole, as split eval")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the export goes")
    parser.add_argument("--tokens-per-file", type=cli.positive, default=16_000_000, metavar="N",
                        help="of a file, about (default %(default)s: 0.8 GB in SpecForge's loader)")  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, metavar="DIR",
                        default=os.environ.get("TOKENHAUL_INGEST_TOKENIZER") or None,
                        help="the model's files (default: TOKENHAUL_INGEST_TOKENIZER)")  # fmt: skip
    parser.add_argument("--gpus", type=cli.positive, metavar="N", help="GPUs that served the model, for the card")
    parser.add_argument("--gpu-hour-price", type=float, metavar="P", help="what an hour of one costs, for the card")
    place.add_argument(parser)


@cli.reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Export, say what it cost; or say that it is done already."""
    if bool(arguments.gpus) != bool(arguments.gpu_hour_price):
        raise SettingsError("--gpus N and --gpu-hour-price P go together")
    card.need_charts()
    filters, format_ = _filters(arguments), _format(arguments)
    exclude = Overlap.load(arguments.exclude) if arguments.exclude else None
    found = place.find(arguments.dataset)
    console = Console(highlight=False, soft_wrap=True)
    with export.begun(arguments.out, _plan(arguments, found)) as plan:
        if (arguments.out / export.CARD).exists():
            console.print(f"{arguments.out} is done already")
            return 0
        view = View(found, plan.snapshot, plan.since)
        work = Export(view, filters, format_, arguments.out, exclude=exclude, tokens_per_file=arguments.tokens_per_file)
        price = Price(arguments.gpus, arguments.gpu_hour_price) if arguments.gpus else None
        notes = _notes(arguments)
        result = work.run(plan, lambda result: card.write(arguments.out, result, price, notes))
    _show(console, arguments, result, notes)
    return 0 if result.stats.rows else 1


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


def _filters(arguments: argparse.Namespace) -> Filters:
    conditions = [where.parse(text) for text in arguments.where]
    text = arguments.format == "conversations"
    if text:
        conditions.append(Where("messages is not null", [Term("messages", "is not null", [])]))
    return Filters(
        finish_reasons=arguments.finish_reason,
        reasoning_closed=arguments.reasoning_closed,
        sources=arguments.source,
        min_output=arguments.min_output,
        max_output=arguments.max_output,
        max_prompt=arguments.max_prompt,
        max_repetition=arguments.max_repetition,
        keep_empty=arguments.keep_empty,
        where=conditions,
        sample=arguments.sample,
        caps=parse_shares(arguments.cap, "--cap", int, bare=True),
        ratios=parse_shares(arguments.ratio, "--ratio", float, bare=False),
        seed=arguments.seed,
        eval_share=arguments.eval,
        max_length=arguments.max_length,
        drop_too_long=text or arguments.too_long == "drop",
        min_supervised=2 if getattr(arguments, "dflash", False) else 1,
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
    for note in notes:
        console.print(note, markup=False)
    console.print(f"{arguments.out / export.CARD}")
