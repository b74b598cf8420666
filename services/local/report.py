"""What a run ends with: the table, one row decoded, what text would have lost, and whether every promise held."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.local.pipeline import Plan, Result
from services.sink.report import Report
from services.sink.verify import verify

_COLUMNS = ["source", "input_ids", "prompt_length", "finish_reason", "matched_stop"]
_TEXT_ROWS = 2000
_SHOWN = 20
_PROMPT_SHOWN, _OUTPUT_SHOWN = 40, 60  # tokens of the sample: the tail of its prompt, the ends of its output


class TextLoss(msgspec.Struct):
    """What storing decoded text instead of ids would have done to `rows` rows."""

    rows: int = 0
    stop_tokens: int = 0
    changed: int = 0


def show(plan: Plan, result: Result) -> int:
    """Print the report; 0 only when every promise held."""
    console = Console()
    report = verify(plan.out / plan.dataset, plan.tokenizer)
    tokenizer = _tokenizer(plan)
    console.print(_table(plan, result, report))
    _print_letters(console, result)
    _print_sample(console, plan, tokenizer)
    loss = _text_loss(plan, tokenizer)
    console.print(
        f"[bold]Stored as text[/bold], {loss.stop_tokens} of {loss.rows} rows would have lost their stop token, and "
        f"{loss.changed} would have come back as other ids when encoded again."
    )
    broken = _broken_promises(result, report)
    if result.halted:
        waiting = result.published - _ended(report)
        console.print(f"[yellow]halted[/yellow]: {result.halted}; {waiting} prompts wait, --resume goes on with them")
    for line in broken:
        console.print(f"[red]✗[/red] {escape(line)}")
    if not broken:
        console.print("[green]✓[/green] verify: chains whole, ids unique, rows exact, prompts rendered again are equal")
    console.print(f"{plan.out / plan.dataset}")
    return 1 if broken else 0


def _broken_promises(result: Result, report: Report) -> list[str]:
    ended = _ended(report)
    broken = [str(problem) for problem in report.problems]
    stopped = {name: totals.stopped for name, totals in result.idle.sources.items() if totals.stopped}
    broken += [f"source {name} was not read to its end: {why}" for name, why in stopped.items()]
    if ended > result.published or (ended < result.published and not result.halted):
        broken.append(f"{result.published} prompts are on the topic, {ended} ended as a row or a failure")
    if not report.rows and not result.halted:
        broken.append("not a single row was made")
    return broken


def _ended(report: Report) -> int:
    """Prompts that are a row or a failure."""
    return report.rows + sum(report.failures.values())


def _table(plan: Plan, result: Result, report: Report) -> Table:
    refused: Counter[str] = Counter()
    for totals in result.idle.sources.values():
        refused.update(totals.refused)
    tokens = report.prompt_tokens + report.output_tokens
    table = Table(title=f"{plan.dataset} · {plan.model}", show_header=False, title_justify="left")
    rows = {
        "prompts": f"{result.published}",
        "rows": f"{report.rows}",
        "failures": _by_reason(report.failures),
        "asked before, not asked again": f"{sum(totals.repeated for totals in result.idle.sources.values())}",
        "refused, never published": _by_reason(refused),
        "truncated (finish_reason length)": f"{report.truncated}",
        "tokens": f"{report.prompt_tokens:,} prompt + {report.output_tokens:,} output",
        "bytes/token, token columns": f"{report.token_bytes / max(tokens, 1):.2f}",
        "bytes/token, with messages and all else": f"{report.bytes / max(tokens, 1):.2f}",
        "shards": f"{report.shards}",
    }
    if generated := _output_tokens_since(plan, result.since):
        rows["output tokens/s of this run, all included"] = (
            f"{generated / result.seconds:.1f} over {result.seconds:.0f} s"
        )
    if result.restarts:
        rows["started again"] = ", ".join(f"{name} {count} times" for name, count in result.restarts.items())
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _output_tokens_since(plan: Plan, since: float) -> int:
    """Output tokens of the rows that were generated since then (Unix time): an --out may hold those of earlier runs."""
    begin = datetime.datetime.fromtimestamp(since, datetime.UTC)
    tokens = 0
    for shard in _shards(plan):
        table = pq.read_table(shard, columns=["generated_at", "output_length"], partitioning=None)
        lengths = table.filter(pc.field("generated_at") >= begin)["output_length"]
        tokens += pc.sum(lengths).as_py() or 0
    return tokens


def _by_reason(counts: dict[str, int]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values())}" + (f" ({reasons})" if reasons else "")


def _print_letters(console: Console, result: Result) -> None:
    """What was refused or failed, each with place and cause."""
    for letter in result.dead[:_SHOWN]:
        ref = letter.source_ref or (letter.prompt.source_ref if letter.prompt else None)
        place = f"{ref.file}:{ref.row}" if ref else letter.source or "?"
        kind = "refused" if letter.stage == "ingest" else "failed"
        console.print(f"{kind} {escape(f'{place}: {letter.reason}: {letter.detail}')}", soft_wrap=True)
    if len(result.dead) > _SHOWN:
        console.print(f"... and {len(result.dead) - _SHOWN} more")


def _print_sample(console: Console, plan: Plan, tokenizer: Any) -> None:
    """One row, its boundary and its stop token visible."""
    row = next((row for row in _rows(plan) if row["finish_reason"] == "stop"), None) or next(_rows(plan), None)
    if row is None:
        return
    ids, boundary = row["input_ids"], row["prompt_length"]
    prompt, output = ids[:boundary], ids[boundary:]
    head, tail = output[:_OUTPUT_SHOWN], output[_OUTPUT_SHOWN:][-8:]
    shown = "".join(
        [
            f"[dim]{'…' if boundary > _PROMPT_SHOWN else ''}{_text(tokenizer, prompt[-_PROMPT_SHOWN:])}[/dim]",
            "[bold magenta]┃[/bold magenta]",
            f"[green]{_text(tokenizer, head)}[/green]",
            f" … [green]{_text(tokenizer, tail)}[/green]" if tail else "",
        ]
    )
    console.print(f"\n[bold]One row[/bold] ({boundary} prompt ids ┃ {len(output)} output ids, the last is {ids[-1]}):")
    console.print(shown, highlight=False)
    console.print()


def _text(tokenizer: Any, ids: list[int]) -> str:
    return escape(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _text_loss(plan: Plan, tokenizer: Any) -> TextLoss:
    """Decode and encode again, as a pipeline that keeps text does."""
    loss = TextLoss()
    for row in islice(_rows(plan), _TEXT_ROWS):
        output = row["input_ids"][row["prompt_length"] :]
        text = tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        stopped_by_id = row["finish_reason"] == "stop" and (row["matched_stop"] or "").isdigit()
        kept = output[:-1] if stopped_by_id else output
        loss.rows += 1
        loss.stop_tokens += stopped_by_id
        loss.changed += tokenizer.encode(text, add_special_tokens=False) != kept
    return loss


def _shards(plan: Plan) -> list[Path]:
    return sorted((plan.out / plan.dataset).glob("partition=*/*.parquet"))


def _rows(plan: Plan) -> Iterator[dict[str, Any]]:
    for shard in _shards(plan):
        for batch in pq.ParquetFile(shard).iter_batches(batch_size=256, columns=_COLUMNS):
            yield from batch.to_pylist()


def _tokenizer(plan: Plan) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(plan.tokenizer, local_files_only=True)
