"""The arguments of `tokenhaul export`, and the filters they ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.dataset import cli, place, where
from services.dataset.filters import Filters
from services.dataset.where import Term, Where
from services.kernel.errors import SettingsError


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


def filters(arguments: argparse.Namespace) -> Filters:
    """Which rows are asked for. Raises SettingsError."""
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
        caps=_shares(arguments.cap, "--cap", int, bare=True),
        ratios=_shares(arguments.ratio, "--ratio", float, bare=False),
        seed=arguments.seed,
        eval_share=arguments.eval,
        max_length=arguments.max_length,
        drop_too_long=text or arguments.too_long == "drop",
        min_supervised=2 if getattr(arguments, "dflash", False) else 1,
    )


def _shares(texts: Sequence[str], option: str, kind: type[Any], *, bare: bool) -> dict[str, Any]:
    """NAME=NUMBER, several times; NUMBER alone, if allowed, is of all sources."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            value = kind(number)
            if value <= 0 or not (equals or bare):
                raise ValueError
        except ValueError:
            forms = "NAME=NUMBER or NUMBER" if bare else "NAME=NUMBER"
            raise SettingsError(f"{option} {text!r} is not {forms}, with a number above 0") from None
        found[name] = value
    return found
