"""Every alert is silent in health and fires in a fault made for it, by promtool's own evaluation of the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.dashboards import alerts
from tests.k8s.manifests import MONITORING, promtool

MINUTES = 180
HEALTHY = {
    'up{job="tokenhaul-ingest", instance="i"}': "1x180",
    'up{job="tokenhaul-generator", instance="g"}': "1x180",
    'up{job="tokenhaul-sink", instance="s"}': "1x180",
    'tokenhaul_build_info{stage="ingest"}': "1x180",
    'tokenhaul_build_info{stage="generator"}': "1x180",
    'tokenhaul_build_info{stage="sink"}': "1x180",
    'tokenhaul_ready{stage="sink", instance="s"}': "1x180",
    'process_start_time_seconds{job="tokenhaul-sink", instance="s"}': "1x180",
    'tokenhaul_engine_ready{engine="e"}': "1x180",
    "tokenhaul_halted": "0x180",
    'tokenhaul_consumer_lag_records{topic="t.prompts"}': "90000-100x180",
    'tokenhaul_consumer_lag_records{topic="t.sequences"}': "1000x180",
    'tokenhaul_records_in_total{stage="ingest"}': "0+200x180",
    'tokenhaul_records_in_total{stage="generator"}': "0+100x180",
    'tokenhaul_records_out_total{stage="generator"}': "0+100x180",
    'tokenhaul_records_out_total{stage="sink"}': "0+100x180",
    'tokenhaul_rejected_total{stage="ingest", reason="bad_field"}': "0+1x180",
    'tokenhaul_ingest_size_bytes{source="a"}': "9000000x180",
    'tokenhaul_ingest_read_bytes{source="a"}': "0+10000x180",
    'tokenhaul_ingest_source_stopped{source="a"}': "0x180",
    'tokenhaul_ingest_broken_files{source="a"}': "0x180",
    "tokenhaul_ingest_reload_refused": "0x180",
    "tokenhaul_ingest_paused": "0x180",
    'tokenhaul_engine_requests_total{engine="e", outcome="stop"}': "0+100x180",
    'tokenhaul_engine_requests_total{engine="e", outcome="http_503"}': "0+1x180",
    'tokenhaul_engine_retractions_total{engine="e"}': "0+1x180",
    'tokenhaul_output_tokens_total{source="a", finish_reason="stop"}': "0+100000x180",
    'tokenhaul_wasted_tokens_total{cause="abort"}': "0+100x180",
    'tokenhaul_sink_rows_total{source="a"}': "0+100x180",
    'tokenhaul_sink_truncated_total{source="a"}': "0+5x180",
    "tokenhaul_sink_duplicates_total": "0+1x180",
    "tokenhaul_sink_commit_conflicts_total": "0x180",
    "tokenhaul_sink_offset_gap_records_total": "0x180",
    "tokenhaul_sink_max_age_seconds": "300x180",
    "tokenhaul_sink_last_commit_timestamp_seconds": "0+60x180",
}
"""A backlog of prompts that gets shorter, one engine, everything in order; one value a minute."""

# {alert: the series that are otherwise, in its fault; what else fires then}
FAULTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "TokenhaulServiceDown": ({'tokenhaul_build_info{stage="generator"}': "_x180"}, set()),
    "TokenhaulNoEngineReady": ({'tokenhaul_engine_ready{engine="e"}': "0x180"}, {"TokenhaulEngineNotReady"}),
    "TokenhaulNotProgressing": ({'tokenhaul_records_out_total{stage="generator"}': "7x180"}, set()),
    "TokenhaulSinkStalled": (  # one of two
        {
            'tokenhaul_consumer_lag_records{topic="t.sequences", instance="b"}': "1000x180",
            'tokenhaul_sink_max_age_seconds{instance="b"}': "300x180",
            'tokenhaul_sink_last_commit_timestamp_seconds{instance="b"}': "6000x180",
        },
        set(),
    ),
    "TokenhaulOffsetGap": ({"tokenhaul_sink_offset_gap_records_total": "0x150 80x30"}, set()),
    "TokenhaulNotReady": ({'tokenhaul_ready{stage="sink", instance="s"}': "1x100 0x80"}, set()),
    "TokenhaulRestarting": (
        {'process_start_time_seconds{job="tokenhaul-sink", instance="s"}': "0+600x180"},
        set(),
    ),
    "TokenhaulEngineNotReady": (
        {'tokenhaul_engine_ready{engine="e"}': "1x180", 'tokenhaul_engine_ready{engine="f"}': "0x180"},
        set(),
    ),
    "TokenhaulIngestStalled": (
        {
            'tokenhaul_records_in_total{stage="ingest"}': "5x180",
            'tokenhaul_rejected_total{stage="ingest", reason="bad_field"}': "1x180",
        },
        set(),
    ),
    "TokenhaulSourceStopped": ({'tokenhaul_ingest_broken_files{source="a"}': "0x100 1x80"}, set()),
    "TokenhaulSourcesFileRefused": ({"tokenhaul_ingest_reload_refused": "0x100 1x80"}, set()),
    "TokenhaulSinkLagGrowing": ({'tokenhaul_consumer_lag_records{topic="t.sequences"}': "0+1000x180"}, set()),
    "TokenhaulRejectRatioHigh": ({'tokenhaul_rejected_total{stage="ingest", reason="bad_field"}': "0+10x180"}, set()),
    "TokenhaulRequestErrorRatioHigh": (
        {'tokenhaul_engine_requests_total{engine="e", outcome="http_503"}': "0+10x180"},
        set(),
    ),
    "TokenhaulTokensWasted": ({'tokenhaul_wasted_tokens_total{cause="abort"}': "0+20000x180"}, set()),
    "TokenhaulEngineThrashing": ({'tokenhaul_engine_retractions_total{engine="e"}': "0+30x180"}, set()),
    "TokenhaulTruncatedRatioHigh": ({'tokenhaul_sink_truncated_total{source="a"}': "0+30x180"}, set()),
    "TokenhaulCommitConflicts": ({"tokenhaul_sink_commit_conflicts_total": "0+1x180"}, set()),
    "TokenhaulDuplicateRatioHigh": ({"tokenhaul_sink_duplicates_total": "0+40x180"}, set()),
    "TokenhaulHalted": (
        {"tokenhaul_halted": "1x180", 'tokenhaul_records_out_total{stage="generator"}': "7x180"},
        set(),
    ),
}


def promtool_file(folder: Path, series: dict[str, str], firing: set[str]) -> Path:
    """A test for promtool: after three hours of `series` these alerts fire and no other."""
    expression = 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0'
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    test: dict[str, Any] = {
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [{"expr": expression, "eval_time": f"{MINUTES}m", "exp_samples": samples}],
            }
        ],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    return file


def test_the_rules_are_rules() -> None:
    promtool("check", "rules", MONITORING / "alerts.yaml")


def test_all_are_silent_in_health(tmp_path: Path) -> None:
    promtool("test", "rules", promtool_file(tmp_path, HEALTHY, set()))


def test_a_fault_is_made_for_each() -> None:
    assert list(FAULTS) == [rule["alert"] for rule in alerts()]


@pytest.mark.parametrize("alert", FAULTS)
def test_it_fires_in_its_fault_and_nothing_beside_it(tmp_path: Path, alert: str) -> None:
    changed, others = FAULTS[alert]
    promtool("test", "rules", promtool_file(tmp_path, HEALTHY | changed, {alert} | others))
