"""Metrics of the generator."""

from __future__ import annotations

import time
from contextlib import suppress

from schemas.sequences import FailureReason, Outcome, Sequence
from services.generator.engine import Engine
from services.generator.window import Load
from services.kernel.metrics import GroupMetrics

_RETRY_CAUSES = ("engine_down", "engine_death", "connection_lost", "abort", "timeout", "http_429", "http_503")
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GeneratorMetrics(GroupMetrics):
    """One container for the process."""

    def __init__(self) -> None:
        super().__init__("generator")
        self._requests = self.counter(
            "tokenhaul_engine_requests", "Requests to engines by how they ended.", "engine", "outcome"
        )
        self._duration = self.histogram(
            "tokenhaul_generate_duration_seconds",
            "From sending a request to its complete answer.",
            _SECONDS,
        )
        self._queue_seconds = self.histogram(
            "tokenhaul_queue_duration_seconds",
            "From taking a prompt in to its first place at an engine.",
            (0.001, 0.01, *_SECONDS),
        )
        self._finish_seconds = self.histogram(
            "tokenhaul_outcome_duration_seconds",
            "From taking a prompt in to its outcome: waiting for a place and all attempts.",
            _SECONDS,
        )
        self._outcomes = self.counter(
            "tokenhaul_outcomes", "Outcomes published, by the source of their prompt.", "source", "outcome"
        )
        self._prompt_tokens = self.counter("tokenhaul_prompt_tokens", "Prompt tokens of finished sequences.", "source")
        self._output_tokens = self.counter(
            "tokenhaul_output_tokens", "Output tokens of finished sequences.", "source", "finish_reason"
        )
        self._wasted = self.counter("tokenhaul_wasted_tokens", "Tokens generated and not kept.", "cause")
        self._engine_tokens = self.counter(
            "tokenhaul_engine_output_tokens", "Output tokens in answers that were right, by who made them.", "engine"
        )
        self._retractions = self.counter(
            "tokenhaul_engine_retractions", "Requests of ours the engine retracted for want of KV memory.", "engine"
        )
        self._unclosed = self.counter(
            "tokenhaul_reasoning_unclosed", "Sequences whose reasoning part was never closed.", "source"
        )
        self._window = self.gauge("tokenhaul_admission_window", "Requests allowed in flight.", "engine")
        self._in_flight = self.gauge("tokenhaul_engine_in_flight", "Requests of ours in flight.", "engine")
        self._ready = self.gauge("tokenhaul_engine_ready", "1 while the engine takes work.", "engine")
        self._running = self.gauge("tokenhaul_engine_running", "Requests the engine runs, of all clients.", "engine")
        self._waiting = self.gauge("tokenhaul_engine_waiting", "Requests that wait there, of all clients.", "engine")
        self._usage = self.gauge("tokenhaul_engine_token_usage_ratio", "Share of its KV pool in use.", "engine")
        self.producers_replaced = self.counter("tokenhaul_producers_replaced", "Producers retired after a failed send.")
        self.halted = self.gauge("tokenhaul_halted", "1 while a budget has stopped the group.")
        self.expect(reasons=[reason.value for reason in FailureReason], causes=_RETRY_CAUSES)
        for cause in ("abort", FailureReason.TRUNCATED.value):
            self._wasted.labels(cause)

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
            if outcome.prompt is not None:
                self._outcomes.labels(outcome.prompt.source, "failure").inc()
            return
        source = outcome.prompt.source
        self._outcomes.labels(source, "sequence").inc()
        self._prompt_tokens.labels(source).inc(len(outcome.prompt.prompt_ids))
        self._output_tokens.labels(source, outcome.finish_reason).inc(len(outcome.output_ids))
        if outcome.reasoning_end == -1:
            self._unclosed.labels(source).inc()

    def placed(self, seconds: float) -> None:
        """A prompt has its first place at an engine, `seconds` after it was taken in."""
        self._queue_seconds.observe(seconds)

    def waste(self, cause: str, tokens: int) -> None:
        """`tokens` were generated and will not be kept."""
        self._wasted.labels(cause).inc(tokens)

    def answered(self, engine: Engine, tokens: int, retractions: int) -> None:
        """`engine` gave `tokens`, and took the request back to its queue that often."""
        self._engine_tokens.labels(engine.name).inc(tokens)
        self._retractions.labels(engine.name).inc(retractions)

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
        self._retractions.labels(engine.name)
        self._engine_tokens.labels(engine.name)

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
