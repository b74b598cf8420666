"""Metrics of the generator."""

from __future__ import annotations

import time

from prometheus_client import Histogram

from schemas.sequences import Outcome, Sequence
from services.kernel.metrics import StageMetrics

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GeneratorMetrics(StageMetrics):
    """One container for the process."""

    def __init__(self) -> None:
        super().__init__("generator")
        self.requests = self.counter("tokenhaul_engine_requests", "Requests to engines by how they ended.", "outcome")
        self.duration = Histogram(
            "tokenhaul_generate_duration_seconds",
            "From sending a request to its complete answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = self.counter("tokenhaul_prompt_tokens", "Prompt tokens of finished sequences.", "source")
        self.output_tokens = self.counter(
            "tokenhaul_output_tokens", "Output tokens of finished sequences.", "source", "finish_reason"
        )
        self.window = self.gauge("tokenhaul_admission_window", "Requests allowed in flight.", "engine")
        self.running = self.gauge("tokenhaul_engine_in_flight", "Requests in flight.", "engine")
        self.engine_up = self.gauge("tokenhaul_engine_ready", "1 while the engine takes work.", "engine")
        self.lag = self.gauge(
            "tokenhaul_consumer_lag_records", "Offsets between the watermark and the end.", "topic", "partition"
        )
        self.commit_failures = self.counter("tokenhaul_commit_failures", "Commits that were refused or failed.")

    def taken(self, records: int, in_flight: int) -> None:
        """`records` were taken in."""
        self.records_in.inc(records)
        self.in_progress.set(in_flight)

    def finished(self, outcome: Outcome, in_flight: int) -> None:
        """An outcome is on its topic."""
        self.records_out.inc()
        self.in_progress.set(in_flight)
        self.last_record.set(time.time())
        if isinstance(outcome, Sequence):
            source = outcome.prompt.source
            self.prompt_tokens.labels(source).inc(len(outcome.prompt.prompt_ids))
            self.output_tokens.labels(source, outcome.finish_reason).inc(len(outcome.output_ids))
        else:
            self.rejected(outcome.reason)
