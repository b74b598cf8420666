"""What Grafana's dashboard linter asks for, and that every metric a panel or an alert names is exported by somebody."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from services.local.engine.metrics import EngineMetrics
from services.reference import metrics, prometheus_rule
from tests.k8s.dashboards import DASHBOARDS, alerts, dashboard, queries, selectors
from tests.k8s.manifests import MONITORING, ROOT

# Its histograms and counters are those of the local engine, held against a real server's recordings in tests/contract.
_ENGINE_GAUGES = {
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
}


def exported() -> set[str]:
    """Every series there can be, by name."""
    names = {"up"} | _ENGINE_GAUGES
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    for registry in (EngineMetrics("model").registry, process):
        for family in registry.collect():
            names |= {f"{family.name}_total"} if family.type == "counter" else {family.name}
            if family.type == "histogram":
                names |= {family.name + suffix for suffix in ("_bucket", "_sum", "_count")}
    for container in metrics().values():
        for one in container.definitions:
            names |= {one.name} if one.kind != "histogram" else {one.name + s for s in ("_bucket", "_sum", "_count")}
    return names


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_rules_of_the_linter(name: str) -> None:
    board = dashboard(name)
    assert board["editable"] is False
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert [v["label"] for v in variables.values() if v["type"] == "datasource"] == ["Data Source"]
    for variable in ("job", "instance"):
        made = variables[variable]
        assert (made["type"], made["multi"], made["includeAll"], made["allValue"]) == ("query", True, True, ".+")
        assert (made["datasource"]["uid"], made["refresh"]) == ("${datasource}", 2)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_can_be_narrowed_and_see_through_restarts(name: str) -> None:
    for query in queries(name):
        for selector in selectors(query.expr):
            matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert {"job", "instance"} <= matchers.keys(), f"{query.panel}: {selector.name}"
        for metric in re.findall(r"[\w:]+_(?:total|bucket)\b", query.raw):
            assert re.search(rf"(rate|increase)\({metric}\{{[^}}]*\}}\[\$__rate_interval\]", query.raw), query.panel


@pytest.mark.parametrize("name", [*DASHBOARDS, "alerts"])
def test_every_metric_is_exported_by_somebody(name: str) -> None:
    asked = [query.expr for query in queries(name)] if name != "alerts" else [rule["expr"] for rule in alerts()]
    names = {selector.name for expr in asked for selector in selectors(expr)}
    assert names <= exported(), names - exported()


def test_every_alert_says_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("page", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert headings == [rule["alert"] for rule in alerts()], "the runbook has a part for each, in this order"


def test_the_operators_form_is_that_of_the_alerts() -> None:
    made = prometheus_rule((MONITORING / "alerts.yaml").read_text())
    assert (MONITORING / "prometheusrule.yaml").read_text() == made, "run `make docs`"
