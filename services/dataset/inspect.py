"""`tokenhaul inspect ID`, `tokenhaul inspect --random N`: rows as their tokens, in the terminal.

Every token stands with its id; the colours tell prompt, reasoning, output and stop apart, and control tokens are shown
as what they are: nothing is hidden, because what is invisible is what goes wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from schemas import ids as record_ids
from services.dataset import cli, place, where
from services.dataset import snapshot as snapshots
from services.dataset.reader import Shard, View, masked
from services.dataset.tokens import Tokens
from services.kernel.errors import SettingsError
from services.sink.rows import SCHEMA

_ID = re.compile(r"[0-9a-f]{32}")
_NAMES = ("id", "request_id", "prompt_id", "conversation_id")
_STYLES = {"prompt": "cyan", "reasoning": "yellow", "output": "green", "stop": "bold white on red"}
_CONTROL = "reverse"
_ID_STYLE = "dim"
_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")  # without colours, too, no id is taken for text
_MOST = 20
_SHOWN = (
    "id", "source", "source_ref", "conversation_id", "turn", "sample_index", "revision", "finish_reason",
    "matched_stop", "prompt_length", "output_length", "reasoning_end", "repetition", "clamped", "engine_capped",
    "sampling", "chat_template_kwargs", "model", "engine_version", "weight_version", "attempts", "generated_at",
    "metadata",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul inspect`."""
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="of a record, a request, a prompt or a conversation: all its rows are shown"
    )
    parser.add_argument("--random", type=cli.positive, metavar="N", help="show N rows chosen at random instead")
    parser.add_argument("--source", metavar="NAME", help="with --random: only rows of this source")
    parser.add_argument("--where", metavar="EXPR", help="with --random: only rows like this (docs/dataset.md)")
    parser.add_argument("--seed", type=int, help="with --random: the same rows every time")
    parser.add_argument("--snapshot", metavar="NAME", help="the dataset as it was then")
    parser.add_argument("--discarded", action="store_true", help="rows that were discarded, and no others")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", default=os.environ.get("TOKENHAUL_INGEST_TOKENIZER") or None,
        help="the model's tokenizer; without one only ids are shown (default: TOKENHAUL_INGEST_TOKENIZER)",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code of the tokenizer")
    parser.add_argument(
        "--tokens", type=cli.positive, default=2000, metavar="N",
        help="show at most N tokens of a row's prompt, and of its output (default %(default)s)",
    )  # fmt: skip
    place.add_argument(parser)


@cli.reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Show the rows; 0 when there were any, else 1."""
    if bool(arguments.id) == bool(arguments.random):
        raise SettingsError("give an ID, or --random N")
    if arguments.id and (arguments.source or arguments.where):
        raise SettingsError("--source and --where go with --random N, not with an ID")
    found = place.find(arguments.dataset)
    view = View(found, snapshots.load(found, arguments.snapshot) if arguments.snapshot else None)
    tokens = Tokens(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    console = Console(highlight=False, soft_wrap=True)
    if arguments.random:
        conditions = [where.parse(arguments.where)] if arguments.where else []
        if arguments.source:
            conditions.append(where.Where("", [where.Term("source", "=", [arguments.source])]))
        rows = choose(view, arguments.random, conditions, arguments.seed, discarded=arguments.discarded)
    else:
        rows = find(view, arguments.id, discarded=arguments.discarded)
    shown = 0
    for row in rows:
        if shown == _MOST and arguments.id:
            console.print(f"... there are more than {_MOST}")
            break
        show(console, row, tokens, arguments.tokens)
        shown += 1
    if not shown:
        console.print(absent(view, arguments.id) if arguments.id else "no row is like that", markup=False)
    return 0 if shown else 1


def find(view: View, id: str, *, discarded: bool = False) -> Iterator[dict[str, Any]]:
    """The rows whose record, request, prompt or conversation has this id."""
    names, shards = _NAMES, view.shards
    if _ID.fullmatch(id):  # a record's own partition is looked at first: most often it is there
        home = record_ids.partition(bytes.fromhex(id), view.place.dataset.partitions)
        shards = sorted(shards, key=lambda shard: shard.partition != home)
    for shard in shards:
        for group, table in enumerate(view.read(shard, names, discarded=discarded)):
            hit = np.zeros(len(table), np.bool_)
            for name in names:
                hit |= np.array(table.column(name).to_pylist(), object) == id
            if hit.any():
                yield from _whole(view, shard, group, np.flatnonzero(hit), discarded)
                if _ID.fullmatch(id) and id in table.column("id").to_pylist():
                    return


def choose(
    view: View, count: int, conditions: list[where.Where], seed: int | None, *, discarded: bool = False
) -> Iterator[dict[str, Any]]:
    """`count` rows that satisfy all `conditions`, each as likely as any other."""
    rng = random.Random(seed)
    columns = [column for condition in conditions for column in condition.columns] or ["id"]
    chosen: list[tuple[Shard, int, int]] = []
    seen = 0
    for shard in view.shards:
        for group, table in enumerate(view.read(shard, columns, discarded=discarded)):
            keep = np.ones(len(table), np.bool_)
            for condition in conditions:
                keep &= condition.matches(table)
            for row in np.flatnonzero(keep).tolist():
                seen += 1
                if len(chosen) < count:
                    chosen.append((shard, group, row))
                elif (at := rng.randrange(seen)) < count:
                    chosen[at] = (shard, group, row)
    for shard, group, row in chosen:
        yield from _whole(view, shard, group, np.array([row]), discarded)


def _whole(view: View, shard: Shard, group: int, rows: np.ndarray[Any, Any], discarded: bool) -> list[dict[str, Any]]:
    """Rows of a group, by their places among those that are read, with all columns."""
    (table,) = view.read(shard, SCHEMA.names, discarded=discarded, only_group=group)
    return list(masked(table, np.isin(np.arange(len(table)), rows)).to_pylist())


def absent(view: View, id: str) -> str:
    """Why no row has this id, as far as the shards tell."""
    for _, footer in view.footers():
        for failed, reason in footer.failures:
            if failed == id and failed not in footer.superseded:
                return f"{id} ended as a failure: {reason}"
    if _ID.fullmatch(id) and bytes.fromhex(id) in view.exclusions.ids:
        return f"{id} was discarded: --discarded shows it"
    return f"{view.place.name} has no row of a record, request, prompt or conversation {id}"


def show(console: Console, row: dict[str, Any], tokens: Tokens, most: int) -> None:
    """One row: its columns, then its tokens."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # nothing is cut off
    for name in _SHOWN:
        if row[name] is not None:
            value = f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name])
            table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    console.print(Text.assemble(*[part for name, style in _STYLES.items() for part in ((f" {name} ", style), " ")]))
    console.print(coloured(row, tokens, most))
    console.rule()


def coloured(row: dict[str, Any], tokens: Tokens, most: int) -> Text:
    """All tokens of a row with their ids; of a long prompt the end is shown, of a long output both ends."""
    text = Text()
    ids, boundary = row["input_ids"], row["prompt_length"]
    left_out = [range(0, boundary - most), range(boundary + most // 2, len(ids) - most // 2)]
    for index, id in enumerate(ids):
        if gap := next((gap for gap in left_out if index in gap), None):
            if index == gap.start:
                text.append(f" … {len(gap)} tokens … ", style="bold")
            continue
        style = _STYLES[part(row, index)]
        shown = tokens.text(id)
        text.append(shown.text, style=f"{style} {_CONTROL}" if shown.control else style)
        text.append(f"{str(id).translate(_SUBSCRIPT)} ", style=_ID_STYLE)
        if shown.text.endswith("⏎"):
            text.append("\n")
    return text


def part(row: dict[str, Any], index: int) -> str:
    """What the token at `index` belongs to: prompt, reasoning, output or stop."""
    if index < row["prompt_length"]:
        return "prompt"
    end, last = row["reasoning_end"], len(row["input_ids"]) - 1
    matched = None if row["matched_stop"] is None else msgspec.json.decode(row["matched_stop"])
    if index == last and row["finish_reason"] == "stop" and isinstance(matched, int):
        return "stop"
    if end is not None and (end == -1 or index <= end):
        return "reasoning"
    return "output"
