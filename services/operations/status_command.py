"""`tokenhaul status [--watch] [--json]`: how far each source is, how busy each engine, what waits where."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.dataset.cli import reports_errors
from services.kernel import logs
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import load
from services.operations.settings import StatusSettings
from services.operations.status import Source, Status
from services.operations.watcher import SAMPLE_SECONDS, Watcher

_UNKNOWN = "?"


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul status`. Where Kafka and the services are comes from the environment."""
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="with --watch (default %(default)s s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a look, for tools")
    parser.add_argument(
        "--root", default=os.environ.get("TOKENHAUL_SINK_ROOT", ""), metavar="PLACE",
        help="where the shards are: rows are counted there, and not asked of the sinks (default: TOKENHAUL_SINK_ROOT)",
    )  # fmt: skip


@reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Look, show, and look again."""
    logs.configure("auto", "warning")
    kafka = Kafka(load(KafkaSettings, os.environ))
    settings = load(StatusSettings, os.environ)
    watcher = Watcher(kafka, settings.metrics, arguments.root)
    asyncio.run(_show(kafka, watcher, arguments))
    return 0


async def _show(kafka: Kafka, watcher: Watcher, arguments: argparse.Namespace) -> None:
    looks = _looks(partial(kafka.patiently, watcher.look), arguments.every, watch=arguments.watch)
    if arguments.json:
        async for status in looks:
            print(msgspec.json.encode(status).decode(), flush=True)
        return
    console = Console()
    if not arguments.watch:
        async for status in looks:
            console.print(render(status))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        async for status in looks:
            live.update(render(status), refresh=True)


async def _looks(look: Callable[[], Awaitable[Status]], every: float, *, watch: bool) -> AsyncIterator[Status]:
    """One look with its rates, or one after the other."""
    await look()
    await asyncio.sleep(min(every, SAMPLE_SECONDS))
    while True:
        yield await look()
        if not watch:
            return
        await asyncio.sleep(every)


def render(status: Status) -> RenderableType:
    """The tables for a terminal."""
    parts: list[RenderableType] = [_headline(status), _sources(status)]
    if status.engines:
        parts.append(_engines(status))
    parts.append(_partitions(status))
    if status.dead:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(status.dead.items()))
        parts.append(Text(f"dead: {reasons}   (tokenhaul dead list)", "yellow"))
    for address, why in sorted(status.unreachable.items()):
        parts.append(Text(f"no metrics from {address}: {why} (TOKENHAUL_STATUS_METRICS)", "yellow"))
    if status.shards_unread is not None:
        parts.append(Text(f"rows are not counted: {status.shards_unread} (--root)", "yellow"))
    return Group(*parts)


def _headline(status: Status) -> Text:
    line = Text.assemble(
        (status.dataset, "bold"), f" ({status.model}): {status.waiting_prompts:,} prompts wait, "
        f"{_rate(status.outcomes_per_second)} outcomes/s, {_rate(status.output_tokens_per_second)} output tokens/s, "
        f"{_duration(status.seconds_left)} left",
    )  # fmt: skip
    if status.rows is not None:
        line.append(f"; {status.rows:,} rows in shards, {status.discarded:,} of them discarded")
    if status.halted is not None:
        line.append(f"\nhalted: {status.halted} (tokenhaul resume)", "bold red")
    return line


def _sources(status: Status) -> Table:
    table = _table("source", "published", "done", "failed", "refused", "%", "per s", "left")
    for name, source in sorted(status.sources.items()):
        table.add_row(
            name, f"{source.published:,}", _count(source.done), f"{source.failed:,}", f"{source.refused:,}",
            _UNKNOWN if source.share is None else f"{source.share:.1%}", _rate(source.per_second), _left(source),
        )  # fmt: skip
    return table


def _engines(status: Status) -> Table:
    table = _table("engine", "ready", "in flight", "window", "running", "waiting", "KV", "requests/s", "tokens/s")
    for name, engine in status.engines.items():
        table.add_row(
            name, "yes" if engine.ready else "NO", str(engine.in_flight), str(engine.window), str(engine.running),
            str(engine.waiting), f"{engine.kv_use:.0%}", _rate(engine.requests_per_second),
            _rate(engine.tokens_per_second),
            style="" if engine.ready else "red",
        )  # fmt: skip
    return table


def _partitions(status: Status) -> Table:
    table = _table("partition", "prompts waiting", "outcomes waiting", "chain tail")
    for number, partition in status.partitions.items():
        table.add_row(str(number), f"{partition.prompts:,}", f"{partition.outcomes:,}", f"{partition.tail:,}")
    table.add_section()
    table.add_row("all", f"{status.waiting_prompts:,}", f"{status.waiting_outcomes:,}", "")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else f"{number:,}"


def _rate(number: float | None) -> str:
    return _UNKNOWN if number is None else f"{number:,.1f}"


def _left(source: Source) -> str:
    return "done" if source.share == 1.0 else _duration(source.seconds_left)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s"
