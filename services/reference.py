"""Writes what is generated from the code: the README's settings, docs/metrics.md, the operator's form of the
alerts, the JSON Schemas of the wire.

python -m services.reference        # `make docs`; a test holds all of it against the code
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

from schemas import control, cursors, dead, prompts, sequences
from services.cli import SETTINGS
from services.generator.metrics import GeneratorMetrics
from services.ingest.metrics import IngestMetrics
from services.ingest.sources import File as SourcesFile
from services.kernel.metrics import Definition, StageMetrics
from services.kernel.settings import describe
from services.sink.metrics import SinkMetrics

MESSAGES = (
    prompts.Prompt,
    sequences.Sequence,
    sequences.Failure,
    dead.DeadLetter,
    cursors.Cursor,
    control.Dataset,
    control.Idle,
    control.Cancel,
    control.Halt,
    control.Spent,
    control.Probes,
    control.Regenerate,
    control.Replay,
    control.Drop,
)
METRICS_INTRODUCTION = """# Metrics

Made by `make docs` from the code. Every service answers `GET /metrics` on
TOKENHAUL_METRICS_HOST:TOKENHAUL_METRICS_PORT (Prometheus text format), beside `/livez` and `/readyz`. Units are base
units: seconds, bytes, tokens, records. Labels are bounded: sources, reasons, causes, engines (host:port), topics and
partitions; never a record, a pod (Prometheus adds it) or a file. What was counted is of this process: `rate()` and
`increase()` see through its restarts, and sums over all pods of a service are meaningful. Standard `process_*` and
`python_info` metrics are there, too.

[Dashboards and alerts](operations.md) are made of these."""
_TABLE = re.compile(r"(?<=<!-- settings: made by `make docs` -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def settings_table() -> str:
    """All settings as Markdown."""
    lines = ["| variable | takes | default | what it is |", "|---|---|---|---|"]
    for cls in SETTINGS:
        for setting in describe(cls):
            default = "**required**" if setting.default is None else f"`{setting.default}`" if setting.default else ""
            allowed = setting.allowed.replace("|", "\\|")
            lines.append(f"| `{setting.variable}` | {allowed} | {default} | {setting.description} |")
    return "\n".join(lines) + "\n"


def with_settings(readme: str) -> str:
    """`readme` with its table of settings as it must be."""
    table = settings_table()
    return _TABLE.sub(lambda _: table, readme)


def metrics() -> dict[str, StageMetrics]:
    """What each service exports, by the name of its subcommand."""
    return {"ingest": IngestMetrics(), "generate": GeneratorMetrics(), "sink": SinkMetrics()}


def metrics_page() -> str:
    """docs/metrics.md."""
    services = {service: container.definitions for service, container in metrics().items()}
    common = [one for one in services["ingest"] if all(one in others for others in services.values())]
    parts = [METRICS_INTRODUCTION, "\n## All services\n", _metrics_table(common)]
    for service, definitions in services.items():
        own = [one for one in definitions if one not in common]
        parts += [f"\n## `tokenhaul {service}`\n", _metrics_table(own)]
    return "\n".join(parts)


def prometheus_rule(alerts: str) -> str:
    """The Prometheus operator's form of the file of `alerts`."""
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tokenhaul", "labels": {"app.kubernetes.io/name": "tokenhaul"}},
    }
    return (
        "# Made by `make docs` from alerts.yaml.\n"
        + yaml.safe_dump(head, sort_keys=False)
        + "spec:\n"
        + "".join(f"  {line}\n" if line else "\n" for line in alerts.splitlines() if not line.startswith("#"))
    )


def _metrics_table(definitions: Sequence[Definition]) -> str:
    lines = ["| metric | type | labels | what it is |", "|---|---|---|---|"]
    for one in definitions:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.name}` | {one.kind} | {labels} | {one.description} |")
    return "\n".join(lines) + "\n"


def json_schemas() -> Iterator[tuple[str, str]]:
    """(file name, text) for every message and for the sources file. On the wire it is msgpack, where bytes are bytes
    and no base64."""
    named = {str(message.__struct_config__.tag): message for message in MESSAGES} | {"sources": SourcesFile}
    for name, type in named.items():
        schema = msgspec.json.encode(msgspec.json.schema(type))
        yield f"{name}.schema.json", msgspec.json.format(schema).decode() + "\n"


def main(root: Path) -> None:
    """Write all of it into the checkout at `root`."""
    readme = root / "README.md"
    readme.write_text(with_settings(readme.read_text()))
    (root / "docs" / "metrics.md").write_text(metrics_page())
    monitoring = root / "k8s" / "components" / "monitoring"
    (monitoring / "prometheusrule.yaml").write_text(prometheus_rule((monitoring / "alerts.yaml").read_text()))
    schemas = root / "schemas" / "json"
    schemas.mkdir(exist_ok=True)
    for name, text in json_schemas():
        (schemas / name).write_text(text)


if __name__ == "__main__":
    main(Path(__file__).parent.parent)
