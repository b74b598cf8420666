"""What the sink exports. Rows, tokens and failures count when their shard is committed, never before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from schemas.sequences import FailureReason
from services.kernel.metrics import GroupMetrics
from services.sink.buffer import Buffer
from services.sink.partition import Partition

_AGE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 3 * 24 * 3600, 7 * 24 * 3600)
_SIZE_BUCKETS = (1e4, 1e5, 1e6, 4e6, 16e6, 32e6, 64e6, 128e6, 256e6, 512e6)
_RETRY_CAUSES = ("store", "kafka", "dead_letters")
_COMMIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class SinkMetrics(GroupMetrics):
    """One attribute per metric."""

    def __init__(self) -> None:
        super().__init__("sink")
        self._rows = self.counter("tokenhaul_sink_rows", "Rows committed.", "source")
        self._tokens = self.counter("tokenhaul_sink_tokens", "Tokens in committed rows.", "kind", "source")
        self._truncated = self.counter(
            "tokenhaul_sink_truncated", "Committed rows whose output ended for its length.", "source"
        )
        self._failures = self.counter("tokenhaul_sink_failures", "Failures committed.", "reason")
        self._duplicates = self.counter("tokenhaul_sink_duplicates", "Outcomes of records decided before.")
        self._superseded = self.counter("tokenhaul_sink_superseded", "Rows that replaced a failure.")
        self._shards = self.counter("tokenhaul_sink_shards_committed", "Shards committed.")
        self.conflicts = self.counter(
            "tokenhaul_sink_commit_conflicts", "Shards that were not committed because another writer was first."
        )
        self._bytes = self.counter("tokenhaul_sink_bytes", "Bytes of committed shards.")
        self.gap_records = self.counter(
            "tokenhaul_sink_offset_gap_records", "Records deleted from the topic before they were committed."
        )
        self._last_commit = self.gauge(
            "tokenhaul_sink_last_commit_timestamp_seconds",
            "When a shard was committed, or nothing waited for one; before that, when the process began.",
        )
        self._last_commit.set(time.time())
        self._shard_bytes = self.histogram(
            "tokenhaul_sink_shard_size_bytes",
            "Bytes of committed shards, each.",
            _SIZE_BUCKETS,
        )
        self._commit_duration = self.histogram(
            "tokenhaul_sink_commit_duration_seconds",
            "From a closed shard to a durable one.",
            _COMMIT_BUCKETS,
        )
        self._record_age = self.histogram(
            "tokenhaul_sink_record_age_seconds",
            "From the making of a prompt to the commit of its row.",
            _AGE_BUCKETS,
        )
        self._buffer_rows = self.gauge("tokenhaul_sink_buffer_rows", "Rows in open shards.")
        self._buffer_bytes = self.gauge("tokenhaul_sink_buffer_bytes", "Memory of open shards, about.")
        self._seen_bytes = self.gauge("tokenhaul_sink_seen_bytes", "Memory of the index of record ids.")
        self._tail = self.gauge("tokenhaul_sink_chain_tail_offset", "Where the chain ends.", "partition")
        self._source_outcomes = self.gauge(
            "tokenhaul_source_outcomes",
            "Prompts that have their row or failure in the chains of this sink, of all time.",
            "source",
        )
        self.max_age = self.gauge(
            "tokenhaul_sink_max_age_seconds", "A record waits no longer than this for its shard (the setting)."
        )
        self._shown: set[int] = set()
        self._sources: set[str] = set()
        self.expect(causes=_RETRY_CAUSES)
        for reason in FailureReason:
            self._failures.labels(reason.value)

    def committed(self, buffer: Buffer, size: int, seconds: float) -> None:
        """`buffer` became a shard of `size` bytes."""
        now = time.time()
        self._shards.inc()
        self._bytes.inc(size)
        self._shard_bytes.observe(size)
        self._last_commit.set(now)
        self._commit_duration.observe(seconds)
        self._duplicates.inc(buffer.duplicates)
        self._superseded.inc(len(buffer.superseded))
        self.records_out.inc(buffer.end - buffer.start - buffer.gap)
        self.last_record.set(now)
        for reason, count in Counter(reason for _, reason in buffer.failures).items():
            self._failures.labels(reason.value).inc(count)
        for source in {row.source for row in buffer.rows}:
            rows = [row for row in buffer.rows if row.source == source]
            self._rows.labels(source).inc(len(rows))
            self._truncated.labels(source).inc(sum(row.finish_reason == "length" for row in rows))
            self._tokens.labels("prompt", source).inc(sum(row.prompt_length for row in rows))
            self._tokens.labels("output", source).inc(sum(row.output_length for row in rows))
        for row in buffer.rows:
            self._record_age.observe(max(0.0, now - row.created_at / 1e6))  # clocks differ, and jump

    def standing(self, topic: str, states: Mapping[int, Partition], ends: Mapping[int, int]) -> None:
        """Bring the gauges up to date: `states` and the `ends` of the log of the partitions we have now."""
        buffers = [state.buffer for state in states.values()]
        self.in_progress.set(sum(buffer.end - buffer.start - buffer.gap for buffer in buffers))
        self._buffer_rows.set(sum(len(buffer.rows) for buffer in buffers))
        self._buffer_bytes.set(sum(buffer.nbytes for buffer in buffers))
        self._seen_bytes.set(sum(state.chain.seen.nbytes for state in states.values()))
        outcomes = sum((state.chain.outcomes for state in states.values()), Counter())
        for source in self._sources | outcomes.keys():
            self._source_outcomes.labels(source).set(outcomes[source])
        self._sources |= outcomes.keys()
        lags = {partition: ends[partition] - state.chain.tail for partition, state in states.items()}
        for partition, state in states.items():
            self._tail.labels(str(partition)).set(state.chain.tail)
            self.lag(topic, partition, lags[partition])
        if states and not any(lags.values()):  # what comes after a pause has not waited since the shard before it
            self._last_commit.set(time.time())
        # What another sink has now, it reports: shown twice, sums over all sinks would be wrong.
        for partition in self._shown - states.keys():
            self._tail.remove(str(partition))
            self.forget_lag(topic, partition)
        self._shown = set(states)
