"""Metrics of the generator."""

from __future__ import annotations

import time
from contextlib import suppress

from prometheus_client import Histogram

from schemas.sequences import Outcome, Sequence
from services.generator.engine import Engine
from services.generator.window import Load
from services.kernel.metrics import StageMetrics

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GeneratorMetrics(StageMetrics):
    """One container for the process."""

    def __init__(self) -> None:
        super().__init__("generator")
        self._requests = self.counter(
            "tokenhaul_engine_requests", "Requests to engines by how they ended.", "engine", "outcome"
        )
        self._duration = Histogram(
            "tokenhaul_generate_duration_seconds",
            "From sending a request to its complete answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._finish_seconds = Histogram(
            "tokenhaul_outcome_duration_seconds",
            "From taking a prompt in to its outcome: waiting for a place and all attempts.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prompt_tokens = self.counter("tokenhaul_prompt_tokens", "Prompt tokens of finished sequences.", "source")
        self._output_tokens = self.counter(
            "tokenhaul_output_tokens", "Output tokens of finished sequences.", "source", "finish_reason"
        )
        self._wasted = self.counter("tokenhaul_wasted_tokens", "Tokens generated and not kept.", "cause")
        self._retractions = self.counter("tokenhaul_engine_retractions", "Requests of ours retracted by engines.")
        self._unclosed = self.counter(
            "tokenhaul_reasoning_unclosed", "Sequences whose reasoning part was never closed.", "source"
        )
        self._window = self.gauge("tokenhaul_admission_window", "Requests allowed in flight.", "engine")
        self._in_flight = self.gauge("tokenhaul_engine_in_flight", "Requests of ours in flight.", "engine")
        self._ready = self.gauge("tokenhaul_engine_ready", "1 while the engine takes work.", "engine")
        self._running = self.gauge("tokenhaul_engine_running", "Requests the engine runs, of all clients.", "engine")
        self._waiting = self.gauge("tokenhaul_engine_waiting", "Requests that wait there, of all clients.", "engine")
        self._usage = self.gauge("tokenhaul_engine_token_usage_ratio", "Share of its KV pool in use.", "engine")
        self._lag = self.gauge(
            "tokenhaul_consumer_lag_records", "Offsets between the watermark and the end.", "topic", "partition"
        )
        self.commit_failures = self.counter("tokenhaul_commit_failures", "Commits that were refused or failed.")
        self.producers_replaced = self.gauge("tokenhaul_producers_replaced", "Producers retired after a failed send.")
        self.halted = self.gauge("tokenhaul_halted", "1 while a budget has stopped the group.")

    def taken(self, records: int, in_flight: int) -> None:
        """`records` were taken in."""
        self.records_in.inc(records)
        self.in_progress.set(in_flight)

    def finished(self, outcome: Outcome, in_flight: int, seconds: float) -> None:
        """An outcome is on its topic, `seconds` after its prompt was taken in."""
        self.records_out.inc()
        self.in_progress.set(in_flight)
        self.last_record.set(time.time())
        self._finish_seconds.observe(seconds)
        if not isinstance(outcome, Sequence):
            self.rejected(outcome.reason)
            return
        source = outcome.prompt.source
        self._prompt_tokens.labels(source).inc(len(outcome.prompt.prompt_ids))
        self._output_tokens.labels(source, outcome.finish_reason).inc(len(outcome.output_ids))
        self._retractions.inc(outcome.num_retractions)
        if outcome.reasoning_end == -1:
            self._unclosed.labels(source).inc()

    def waste(self, cause: str, tokens: int) -> None:
        """`tokens` were generated and will not be kept."""
        self._wasted.labels(cause).inc(tokens)

    def requested(self, engine: Engine, outcome: str, seconds: float) -> None:
        """A request to `engine` ended."""
        self._requests.labels(engine.name, outcome).inc()
        if outcome in ("stop", "length"):
            self._duration.observe(seconds)

    def engine(self, engine: Engine) -> None:
        """How the engine stands with us."""
        self._window.labels(engine.name).set(engine.window.limit)
        self._in_flight.labels(engine.name).set(engine.in_flight)
        self._ready.labels(engine.name).set(engine.ready)

    def load(self, engine: Engine, load: Load) -> None:
        """What the engine says of itself."""
        self._running.labels(engine.name).set(load.running)
        self._waiting.labels(engine.name).set(load.waiting)
        self._usage.labels(engine.name).set(load.usage)

    def forget(self, engine: Engine) -> None:
        """The engine's address is gone."""
        for gauge in (self._window, self._in_flight, self._ready, self._running, self._waiting, self._usage):
            with suppress(KeyError):  # never set
                gauge.remove(engine.name)

    def lag(self, topic: str, partition: int, records: int) -> None:
        """How far the watermark of a partition is behind its end."""
        self._lag.labels(topic, str(partition)).set(records)
