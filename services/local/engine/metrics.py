"""`GET /metrics` with the names and labels of SGLang 0.5.23 that dashboards read (recordings 20, 34d)."""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.local.engine.jobs import Job, Jobs

WINDOW_SECONDS = 10.0
LATENCY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
RANKS = {"engine_type": "unified", "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}


class Throughput:
    """Tokens per second over the last ten seconds."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()

    def generated(self, count: int) -> None:
        """`count` tokens, now."""
        self._recent.append((time.monotonic(), count))
        self._forget()

    def rate(self) -> float:
        """Tokens per second."""
        self._forget()
        return sum(count for _, count in self._recent) / WINDOW_SECONDS

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - WINDOW_SECONDS:
            self._recent.popleft()


class EngineMetrics:
    """An observer of jobs. Its gauges read the jobs when they are scraped, so they cannot drift."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.throughput = Throughput()
        self.cache_hit_rate = 0.0
        self._ranks = {"model_name": model_name, **RANKS}
        self._names = {"model_name": model_name, "engine_type": RANKS["engine_type"]}
        streaming = [*self._names, "is_streaming"]
        plain = list(self._names)
        self._requests = self._counter("num_requests", "Number of requests processed.", streaming)
        self._prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.", streaming)
        self._output_tokens = self._counter("generation_tokens", "Generation tokens processed.", streaming)
        self._aborted = self._counter("num_aborted_requests", "Number of requests aborted.", plain)
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token.", plain)
        self._latency = self._histogram("e2e_request_latency_seconds", "End-to-end latency.", plain)
        self._queue_time = self._histogram("queue_time_seconds", "Time in the queue.", list(self._ranks))
        # A series that starts at its first increase hides that increase from rate().
        self._aborted.labels(**self._names)
        for flag in ("false", "true"):
            for counter in (self._requests, self._prompt_tokens, self._output_tokens):
                counter.labels(**self._names, is_streaming=flag)

    def watch(self, jobs: Jobs, total_tokens: int) -> None:
        """Show the state of `jobs`; `total_tokens` is the capacity of the KV cache."""
        gauges = {
            "num_running_reqs": ("The number of running requests.", lambda: len(jobs.running)),
            "num_queue_reqs": ("The number of requests in the waiting queue.", lambda: len(jobs.waiting)),
            "num_used_tokens": ("The number of used tokens.", lambda: jobs.used_tokens),
            "token_usage": ("The token usage.", lambda: jobs.used_tokens / total_tokens),
            "gen_throughput": ("The generation throughput (token/s).", self.throughput.rate),
            "cache_hit_rate": ("The prefix cache hit rate.", lambda: self.cache_hit_rate),
            "num_retracted_reqs": ("The number of retracted requests.", lambda: 0),
        }
        for name, (text, read) in gauges.items():
            gauge = Gauge(f"sglang:{name}", text, list(self._ranks), registry=self.registry)
            gauge.labels(**self._ranks).set_function(read)

    def generated(self, count: int) -> None:
        """`count` ids more."""
        self.throughput.generated(count)

    def finished(self, job: Job) -> None:
        """Count a job that is done, also one that failed or never ran."""
        names = {**self._names, "is_streaming": "true" if job.generation.stream else "false"}
        self._requests.labels(**names).inc()
        self._output_tokens.labels(**names).inc(len(job.output_ids))
        self._latency.labels(**self._names).observe(job.finished - job.received)
        if job.finish_reason is not None and job.finish_reason["type"] == "abort":
            self._aborted.labels(**self._names).inc()
        if job.started:
            self._queue_time.labels(**self._ranks).observe(job.started - job.received)
        if job.first_token:
            prompt = len(job.generation.prompt_ids)
            self._prompt_tokens.labels(**names).inc(prompt)
            self._first_token.labels(**self._names).observe(job.first_token - job.received)
            self.cache_hit_rate = job.cached_tokens / prompt

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"sglang:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: list[str]) -> Histogram:
        return Histogram(f"sglang:{name}", text, labels, registry=self.registry, buckets=LATENCY_BUCKETS)
