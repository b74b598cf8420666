"""What every service exports: one stage in the stream, what came in, is in progress, went out and was refused."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)


class Definition(NamedTuple):
    """A metric as people read of it; `name` is the one on /metrics."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


class StageMetrics:
    """Base of each service's container. The registry is the process's own, never the global one."""

    def __init__(self, stage: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.definitions: list[Definition] = []
        build = Info("tokenhaul_build", "What is running.", registry=self.registry)
        self._define("tokenhaul_build_info", "gauge", ("version", "python", "stage"), "What is running; always 1.")
        build.info({"version": version("tokenhaul"), "python": platform.python_version(), "stage": stage})
        self.records_in = self.counter("tokenhaul_records_in", "Records taken in.", "stage").labels(stage)
        self.records_out = self.counter("tokenhaul_records_out", "Records sent on.", "stage").labels(stage)
        self.in_progress = self.gauge(
            "tokenhaul_records_in_progress", "Records taken in and not sent on yet.", "stage"
        ).labels(stage)
        self.last_record = self.gauge(
            "tokenhaul_last_record_timestamp_seconds",
            "When the last record was sent on; before the first, when the process began.",
            "stage",
        ).labels(stage)
        self.last_record.set(time.time())
        self.ready = self.gauge("tokenhaul_ready", "1 while /readyz says so.", "stage").labels(stage)
        self._rejected = self.counter("tokenhaul_rejected", "Records refused.", "stage", "reason")
        self._retries = self.counter("tokenhaul_retries", "Attempts made again.", "stage", "cause")
        self._stage = stage

    def counter(self, name: str, description: str, *labels: str) -> Counter:
        """A counter of this registry (`_total` is put behind its name)."""
        self._define(f"{name}_total", "counter", labels, description)
        return Counter(name, description, labels, registry=self.registry)

    def gauge(self, name: str, description: str, *labels: str) -> Gauge:
        """A gauge of this registry."""
        self._define(name, "gauge", labels, description)
        return Gauge(name, description, labels, registry=self.registry)

    def histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        """A histogram of this registry."""
        self._define(name, "histogram", (), description)
        return Histogram(name, description, registry=self.registry, buckets=buckets)

    def _define(self, name: str, kind: str, labels: tuple[str, ...], description: str) -> None:
        self.definitions.append(Definition(name, kind, labels, description))

    def rejected(self, reason: str) -> None:
        """One record was refused."""
        self._rejected.labels(self._stage, reason).inc()

    def retried(self, cause: str) -> None:
        """One attempt failed in a way that may pass."""
        self._retries.labels(self._stage, cause).inc()

    def expect(self, *, reasons: Iterable[str] = (), causes: Iterable[str] = ()) -> None:
        """Show these at 0: a series that begins with its first increase hides that increase from rate()."""
        for reason in reasons:
            self._rejected.labels(self._stage, reason)
        for cause in causes:
            self._retries.labels(self._stage, cause)


class GroupMetrics(StageMetrics):
    """Of a service that is a member of a consumer group."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.rebalances = self.counter("tokenhaul_rebalances", "Times the group's partitions were dealt anew.")
        self.commit_failures = self.counter("tokenhaul_commit_failures", "Offset commits that were refused or failed.")
        self._lag = self.gauge(
            "tokenhaul_consumer_lag_records", "Records of the topic that are not done yet.", "topic", "partition"
        )

    def lag(self, topic: str, partition: int, records: int) -> None:
        """How far what is done of an assigned partition is behind its end."""
        self._lag.labels(topic, str(partition)).set(records)

    def forget_lag(self, topic: str, partition: int) -> None:
        """Another member has the partition, and reports it: shown twice, the sum over all members would be wrong."""
        with suppress(KeyError):  # never shown
            self._lag.remove(topic, str(partition))
