"""`tokenhaul discard --where EXPR --reason TEXT`: rows that are not to be used any more.

Shards are never changed: the ids of the rows go to a list (services/sink/exclusions.py) that is honoured by export,
inspect and regenerate, and counted by verify and status. Rows that arrive later are not in it, whatever they are like.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from services.dataset import cli, place, where
from services.dataset.progress import progress
from services.dataset.reader import View, masked
from services.dataset.where import Where
from services.kernel.errors import SettingsError
from services.sink import exclusions
from services.sink.exclusions import Exclusion


class Found(msgspec.Struct):
    """Rows that satisfy a condition: their ids, and what they are."""

    ids: list[str] = []
    by: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    tokens: int = 0

    def table(self) -> Table:
        """How many there are, by source and finish reason."""
        table = Table("source", "finish_reason", "rows")
        for (source, reason), count in sorted(self.by.items()):
            table.add_row(source, reason, str(count))
        table.add_section()
        table.add_row("all", f"{self.tokens:,} output tokens", str(len(self.ids)))
        return table


def find(view: View, condition: Where, *, discarded: bool = False) -> Found:
    """The rows of `view` that satisfy `condition`. Takes about 90 bytes for each of them."""
    columns = list(dict.fromkeys([*condition.columns, "id", "source", "finish_reason", "output_length"]))
    found = Found()
    for shard in progress(view.shards, "looking for rows"):
        for table in view.read(shard, columns, discarded=discarded):
            table = masked(table, condition.matches(table))
            found.ids += map(str, table.column("id").to_pylist())
            names = [map(str, table.column(name).to_pylist()) for name in ("source", "finish_reason")]
            found.by.update(zip(*names, strict=True))
            found.tokens += int(np.sum(table.column("output_length").to_numpy()))
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul discard`."""
    parser.add_argument("--where", required=True, metavar="EXPR", help="which rows (docs/dataset.md)")
    parser.add_argument("--reason", metavar="TEXT", help="why, for whoever wonders later; required unless --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="say how many rows it would be, discard none")
    place.add_argument(parser)


@cli.reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Find the rows, show them, exclude them."""
    if not arguments.dry_run and not (arguments.reason or "").strip():
        raise SettingsError("--reason TEXT is required: say why these rows are not to be used")
    condition = where.parse(arguments.where)
    dataset = place.find(arguments.dataset)
    found = find(View(dataset), condition)
    console = Console(highlight=False)
    console.print(found.table())
    if arguments.dry_run:
        console.print("nothing was discarded (--dry-run)")
    elif not found.ids:
        console.print("no row is like that: nothing was discarded")
    else:
        exclusion = Exclusion(
            reason=arguments.reason, where=condition.text, rows=len(found.ids), created_at=time.time()
        )
        name = exclusions.write(dataset.store, dataset.folder, found.ids, exclusion)
        console.print(
            f"{len(found.ids)} rows are discarded: {dataset.store.name(dataset.key(exclusions.FOLDER, name))}",
            soft_wrap=True,
        )
    return 0
