"""The dashboards' panels and the alerts, with the PromQL that stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import promql_parser
import yaml

from tests.k8s.manifests import MONITORING

DASHBOARDS = sorted(path.stem for path in (MONITORING / "dashboards").glob("*.json"))


class Query(NamedTuple):
    """One target of a panel; `expr` has Grafana's variables filled in, as on a first visit."""

    panel: str
    raw: str
    expr: str


def dashboard(name: str) -> dict[str, Any]:
    """The JSON of a dashboard."""
    return msgspec.json.decode((MONITORING / "dashboards" / f"{name}.json").read_bytes(), type=dict[str, Any])


def queries(name: str, rate_interval: str = "5m") -> list[Query]:
    """Every target of every panel of a dashboard."""
    return [
        Query(panel["title"], target["expr"], filled(target["expr"], rate_interval))
        for panel in dashboard(name)["panels"]
        for target in panel["targets"]
    ]


def filled(expr: str, rate_interval: str = "5m") -> str:
    """`expr` as Prometheus gets it when nothing is chosen."""
    expr = re.sub(r"\$(job|instance)\b", ".+", expr).replace("$__rate_interval", rate_interval)
    return expr.replace("$gpus", "1")


def alerts() -> list[dict[str, Any]]:
    """Every alert."""
    read = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def selectors(expr: str) -> Iterator[promql_parser.VectorSelector]:
    """Every vector selector in `expr`. Raises ValueError for what is no PromQL."""
    return _selectors(promql_parser.parse(expr))


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield node.vector_selector
        case promql_parser.BinaryExpr():
            yield from _selectors(node.lhs)
            yield from _selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from _selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from _selectors(node.expr)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            raise AssertionError(f"{type(node).__name__}: teach this walk about it")
