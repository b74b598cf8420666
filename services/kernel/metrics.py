"""What every service exports: one stage in the stream, what came in, is in progress, went out and was refused."""

from __future__ import annotations

import platform
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    PlatformCollector,
    ProcessCollector,
)


class StageMetrics:
    """Base of each service's container. The registry is the process's own, never the global one."""

    def __init__(self, stage: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        build = Info("tokenhaul_build", "What is running.", registry=self.registry)
        build.info({"version": version("tokenhaul"), "python": platform.python_version(), "stage": stage})
        self.records_in = self.counter("tokenhaul_records_in", "Records taken in.", "stage").labels(stage)
        self.records_out = self.counter("tokenhaul_records_out", "Records sent on.", "stage").labels(stage)
        self.in_progress = self.gauge(
            "tokenhaul_records_in_progress", "Records taken in and not sent on yet.", "stage"
        ).labels(stage)
        self.last_record = self.gauge(
            "tokenhaul_last_record_timestamp_seconds", "When the last record was sent on.", "stage"
        ).labels(stage)
        self._rejected = self.counter("tokenhaul_rejected", "Records refused.", "stage", "reason")
        self._retries = self.counter("tokenhaul_retries", "Attempts made again.", "stage", "cause")
        self._stage = stage

    def counter(self, name: str, description: str, *labels: str) -> Counter:
        """A counter of this registry (`_total` is put behind its name)."""
        return Counter(name, description, labels, registry=self.registry)

    def gauge(self, name: str, description: str, *labels: str) -> Gauge:
        """A gauge of this registry."""
        return Gauge(name, description, labels, registry=self.registry)

    def rejected(self, reason: str) -> None:
        """One record was refused."""
        self._rejected.labels(self._stage, reason).inc()

    def retried(self, cause: str) -> None:
        """One attempt failed in a way that may pass."""
        self._retries.labels(self._stage, cause).inc()
