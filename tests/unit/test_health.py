"""What the probes answer, and when."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from services.kernel import health
from services.kernel.health import Health
from services.kernel.metrics import StageMetrics
from services.local.kafka import free_ports


async def test_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now))
    state, metrics, (port,) = Health(), StageMetrics("test"), free_ports(1)
    metrics.rejected("bad")
    runner = await health.serve(state, metrics.registry, "127.0.0.1", port)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

            async def ask(path: str) -> tuple[int, str]:
                answer = await http.get(path)
                return answer.status_code, answer.text.strip()

            state.set_ready(because="waiting for Kafka at k:9092")
            now += 10_000
            assert await ask("/readyz") == (503, "waiting for Kafka at k:9092")
            assert await ask("/livez") == (200, "ok"), "a restart does not bring Kafka back"
            state.set_ready()
            assert [await ask("/readyz"), await ask("/livez")] == [(200, "ok"), (200, "ok")]
            now += health.LOOP_LIMIT_SECONDS + 1
            assert await ask("/livez") == (503, "the loop has not turned for 121 s")
            state.beat()
            assert await ask("/livez") == (200, "ok")
            status, text = await ask("/metrics")
            assert status == 200
            assert 'tokenhaul_rejected_total{reason="bad",stage="test"} 1.0' in text
    finally:
        await runner.cleanup()
