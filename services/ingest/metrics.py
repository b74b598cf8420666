"""What ingest exports beside the metrics of every stage: per source what was done, and how much there is to do."""

from __future__ import annotations

from collections.abc import Mapping

from services.ingest.turn import Progress
from services.kernel.metrics import StageMetrics

_TRANSACTION_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class IngestMetrics(StageMetrics):
    """(size_bytes - read_bytes) / rate(read_bytes) is the time left of a source, while its files do not grow."""

    def __init__(self) -> None:
        super().__init__("ingest")
        self._seen = self.counter("tokenhaul_ingest_seen", "Records read, blank lines aside.", "source")
        self._published = self.counter("tokenhaul_ingest_published", "Prompts published.", "source")
        self._repeated = self.counter(
            "tokenhaul_ingest_repeated", "Prompts not published, because they are on the topic already.", "source"
        )
        self._refused = self.counter("tokenhaul_ingest_refused", "Records refused, by reason.", "source", "reason")
        self._tokens = self.counter("tokenhaul_ingest_prompt_tokens", "Token ids of published prompts.", "source")
        self._prompts = self.gauge(
            "tokenhaul_source_prompts", "Prompts of the source on the topic, of all time.", "source"
        )
        self._read_bytes = self.gauge(
            "tokenhaul_ingest_read_bytes", "Bytes of the source's files that are read.", "source"
        )
        self._size_bytes = self.gauge("tokenhaul_ingest_size_bytes", "Bytes of the source's files.", "source")
        self._lag_bytes = self.gauge(
            "tokenhaul_ingest_lag_bytes", "Bytes of the source's files that are not read yet.", "source"
        )
        self._rows = self.gauge(
            "tokenhaul_ingest_rows", "Records of the source, where all of its files say how many they hold.", "source"
        )
        self._broken = self.gauge(
            "tokenhaul_ingest_broken_files", "Files of the source that cannot be read as they are now.", "source"
        )
        self._stopped = self.gauge(
            "tokenhaul_ingest_source_stopped", "1: nothing more is read of the source; the log says why.", "source"
        )
        self._backlog = self.gauge("tokenhaul_ingest_backlog", "Prompts that wait for the generators, about.")
        self.paused = self.gauge("tokenhaul_ingest_paused", "1 while reading waits, because that many prompts do.")
        self.reload_refused = self.gauge(
            "tokenhaul_ingest_reload_refused", "1: the sources file was edited into something that is not taken."
        )
        self.transaction_seconds = self.histogram(
            "tokenhaul_ingest_transaction_seconds",
            "From the beginning of a transaction to its commit.",
            _TRANSACTION_SECONDS,
        )
        self.expect(causes=("kafka", "transaction_timeout"))

    def recovered(self, published: Mapping[str, int]) -> None:
        """What the cursors say was published of each source."""
        for source, prompts in published.items():
            self._prompts.labels(source).set(prompts)

    def hauled(
        self, source: str, seen: int, published: int, repeated: int, refused: Mapping[str, int], tokens: int
    ) -> None:
        """A batch is committed."""
        self._seen.labels(source).inc(seen)
        self._published.labels(source).inc(published)
        self._prompts.labels(source).inc(published)
        self._repeated.labels(source).inc(repeated)
        self._tokens.labels(source).inc(tokens)
        for reason, count in refused.items():
            self._refused.labels(source, reason).inc(count)
            for _ in range(count):
                self.rejected(reason)
        self.records_out.inc(published)
        self.last_record.set_to_current_time()

    def progress(
        self, sources: Mapping[str, Progress], stopped: Mapping[str, str], in_progress: int, backlog: int
    ) -> None:
        """How far each source is, which ones are stopped, the records being tokenized or published, and what waits."""
        self._backlog.set(backlog)
        for source, progress in sources.items():
            for counter in (self._seen, self._published, self._repeated, self._tokens):
                counter.labels(source)  # shown at 0: a series that begins with its first increase hides it from rate()
            self._read_bytes.labels(source).set(progress.read)
            self._size_bytes.labels(source).set(progress.size)
            self._lag_bytes.labels(source).set(progress.size - progress.read)
            self._broken.labels(source).set(progress.broken)
            self._stopped.labels(source).set(source in stopped)
            if progress.rows is not None:
                self._rows.labels(source).set(progress.rows)
        self.in_progress.set(in_progress)
