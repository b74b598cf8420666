"""One line that tells how far a run is: prompts in, rows out, tokens per second, time left."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

_SCRAPE_SECONDS = 0.5
_PLAIN_SECONDS = 5.0


class Progress:
    """Reads the services' own metrics. A bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, generator_log: Path) -> None:
        self._generator_log = generator_log
        self._console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self._console, transient=True
        )
        self.prompts: int | None = None
        """How many prompts there are in all, once ingest is done."""
        self._task = self._bar.add_task("starting", total=None)
        self._ports: dict[str, int] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._base: dict[tuple[str, str], float] = {}
        self._began = time.monotonic()
        self._scraped = self._printed = 0.0

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def watch(self, service: str, port: int) -> None:
        """Read the metrics of `service` from this loopback port."""
        self._ports[service] = port

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text)

    def update(self) -> None:
        """Read and show, if it is time to."""
        now = time.monotonic()
        if now - self._scraped < _SCRAPE_SECONDS:
            return
        self._scraped = now
        for service, port in self._ports.items():
            self._scrape(service, port)
        prompts = self.prompts or self._total("tokenhaul_records_out_total", "ingest")
        rows = self._total("tokenhaul_sink_rows_total", "sink")
        finished = self._total("tokenhaul_records_out_total", "generate")
        tokens = self._total("tokenhaul_output_tokens_total", "generate")
        seconds = now - self._began
        left = (self.prompts - finished) * seconds / finished if finished and self.prompts else None
        text = (
            f"prompts in {prompts:.0f} · answered {finished:.0f} · rows out {rows:.0f} · "
            f"{tokens / seconds:.0f} tokens/s · ETA {'-' if left is None else f'{left:.0f} s'}"
        )
        if prompts > finished and not self._total("tokenhaul_engine_ready", "generate"):
            text += f" · no engine takes work{self._trouble()}"
        self._bar.update(self._task, description=text, total=prompts or None, completed=finished)
        if not self._console.is_terminal and now - self._printed > _PLAIN_SECONDS:
            self._printed = now
            self._console.print(text)

    def _scrape(self, service: str, port: int) -> None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1.0) as answer:
                text = answer.read().decode()
        except (OSError, urllib.error.URLError):
            return  # starting, ended or killed: its numbers stay as they were
        sums: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (service, sample.name)
                sums[key] = sums.get(key, 0.0) + sample.value
        for key, value in sums.items():
            if value < self._last.get(key, 0.0):  # the process was started again and counts from zero
                self._base[key] = self._base.get(key, 0.0) + self._last[key]
            self._last[key] = value

    def _trouble(self) -> str:
        """What the generator said last of an engine."""
        try:
            lines = self._generator_log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line["message"] for line in map(_json, lines[-200:]) if line.get("action") == "engine"]
        return f": {said[-1]}" if said else ""

    def _total(self, metric: str, service: str) -> float:
        key = (service, metric)
        return self._base.get(key, 0.0) + self._last.get(key, 0.0)


def _json(line: str) -> dict[str, Any]:
    """A line of a service's log; empty for what is none."""
    try:
        read = json.loads(line)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
