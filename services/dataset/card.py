"""The card of an export: README.md and two charts, enough to know in a year what the files are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
import yaml

from services.dataset.export import Result
from services.dataset.export_plan import CARD
from services.dataset.stats import EDGES
from services.kernel.errors import SettingsError

_SHOWN = 20
_TITLES = {
    "finish_reason": "Finish reasons", "sampling": "Sampling", "chat_template_kwargs": "Template switches",
    "model": "Models", "engine_version": "Engine versions", "weight_version": "Weight versions",
    "tokenizer_fingerprint": "Tokenizers (fingerprint of files, template and switches)",
}  # fmt: skip


class Price(msgspec.Struct, frozen=True):
    """What serving the model costs."""

    gpus: int
    per_gpu_hour: float


def need_charts() -> None:
    """Raise SettingsError at once when the charts could not be drawn at the end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            "the card's charts are drawn by matplotlib, which is not installed: pip install 'tokenhaul[export]'"
        ) from error


def write(out: Path, result: Result, price: Price | None, notes: Sequence[str]) -> None:
    """Charts first, then the card: it says that the export is whole."""
    for name in ("prompt", "output"):
        _chart(out / f"{name}_lengths.png", f"{name} tokens", getattr(result.stats, f"{name}_lengths"))
    temporary = out / f"{CARD}.part"
    temporary.write_text("\n".join(_lines(result, price, notes)) + "\n", encoding="utf-8")
    os.replace(temporary, out / CARD)


def is_empty(out: Path) -> bool:
    """Whether the card in `out` says that no row was taken."""
    return re.search(r"^rows: 0$", (out / CARD).read_text(encoding="utf-8"), re.MULTILINE) is not None


def _lines(result: Result, price: Price | None, notes: Sequence[str]) -> Iterator[str]:
    plan, stats = result.plan, result.stats
    front = {
        "tags": ["speculative-decoding", "tokenhaul", plan.format],
        "base_model": plan.snapshot.model,
        "dataset": plan.snapshot.dataset,
        "rows": stats.rows,
        "supervised_tokens": stats.output_tokens,
    }
    yield f"---\n{yaml.safe_dump(front, sort_keys=False)}---"
    yield f"\n# {plan.snapshot.dataset}, exported for {plan.format}\n"
    yield f"Answers of **{plan.snapshot.model}**, {'as text' if plan.format == 'conversations' else 'token by token'}."
    yield f"Made by tokenhaul {version('tokenhaul')} from {_snapshot(result)}.\n"
    yield from (f"{note}\n" for note in notes)
    tokens = stats.prompt_tokens + stats.output_tokens
    yield f"\n## Rows and tokens\n\n{stats.rows:,} rows, {tokens:,} tokens, of which "
    yield f"{stats.output_tokens:,} are supervised (those of the answers; masks are not shifted).\n"
    yield from _table(
        ("source", "rows", "prompt tokens", "supervised tokens"),
        [(name, s.rows, s.prompt_tokens, s.output_tokens) for name, s in sorted(stats.sources.items())],
    )
    if isinstance(size := plan.asked.get("draft_vocab_size"), int):
        yield f"\n{result.frequencies.coverage(size)}"
    yield "\n![lengths of prompts](prompt_lengths.png) ![lengths of answers](output_lengths.png)\n"
    yield "\n## What was left out\n"
    cut = f"{stats.cut:,} rows were cut to {plan.asked['max_length']} tokens"
    yield f"{cut}: {stats.lost_tokens:,} supervised tokens of theirs are gone.\n"
    left = [(why, n, result.left_out_tokens.get(why, "")) for why, n in sorted(result.left_out.items()) if n]
    yield from _table(("rows left out because", "rows", "supervised tokens"), left)
    yield "\n## Cost\n"
    yield from _cost(result, price)
    for column, title in _TITLES.items():
        counts = sorted(stats.counts.get(column, {}).items(), key=lambda item: (-item[1], item[0]))
        yield f"\n## {title}\n"
        yield from _table(("", "rows"), [(f"`{value}`", count) for value, count in counts[:_SHOWN]])
        if len(counts) > _SHOWN:
            yield f"\n... and {len(counts) - _SHOWN} more"
    yield "\n## Files\n"
    yield from _table(("split", "files"), [(split, len(names)) for split, names in result.files.items() if names])
    yield "\n## Asked for\n\n```json"
    yield msgspec.json.format(
        msgspec.json.encode({k: v for k, v in plan.asked.items() if v not in (None, [], False)})
    ).decode()
    yield "```"


def _snapshot(result: Result) -> str:
    snapshot, since = result.plan.snapshot, result.plan.since
    name = f"snapshot `{snapshot.name}`" if snapshot.name else "the dataset as it was"
    taken = f"{datetime.fromtimestamp(snapshot.created_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    text = f"{name} of {taken} ({sum(snapshot.tails):,} outcomes, {len(snapshot.exclusions)} lists of exclusions)"
    return f"{text}, what came after snapshot `{since.name}`" if since else text


def _cost(result: Result, price: Price | None) -> Iterator[str]:
    hours, millions = result.busy_seconds / 3600, result.stats.output_tokens / 1e6
    yield f"Engines were at work on the rows that were read for {hours:,.3f} hours (pauses not counted)."
    if price is None:
        yield "Give `--gpus N --gpu-hour-price P` to have GPU-hours and the price of a million kept tokens here."
        return
    gpu_hours = hours * price.gpus
    yield f"On {price.gpus} GPUs that is {gpu_hours:,.3f} GPU-hours, {gpu_hours * price.per_gpu_hour:,.2f} at "
    yield f"{price.per_gpu_hour:,.2f} per GPU-hour"
    if millions:
        yield f", or {gpu_hours * price.per_gpu_hour / millions:,.4f} per million supervised tokens kept."


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    if not rows:
        yield "none"
        return
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def _chart(path: Path, what: str, counts: list[int]) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    used = [number for number, count in enumerate(counts) if count]
    first, last = (used[0], used[-1]) if used else (0, 0)
    edges = [*EDGES[first : last + 1].tolist(), int(EDGES[last + 1]) if last + 1 < len(EDGES) else int(EDGES[last]) * 2]
    axes.stairs(counts[first : last + 1], edges, fill=True)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(what)
    axes.set_ylabel("rows")
    temporary = path.with_suffix(".part")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
