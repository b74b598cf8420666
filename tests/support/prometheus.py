"""A real Prometheus over services on this machine, with the alerts of k8s/ in a hurry."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from services.local.kafka import free_ports
from services.local.processes import Child, end
from tests.k8s.manifests import MONITORING
from tests.support.processes import wait_for

SCRAPE_SECONDS = 0.5
_MINUTE_MS = 400
"""What a minute of the rules becomes: `for: 5m` is 2 seconds then."""


class Prometheus:
    """Asks one that runs."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def query(self, expr: str) -> list[float]:
        """The values of an instant query, now."""
        return [float(sample["value"][1]) for sample in self._get("/api/v1/query", query=expr)["result"]]

    def firing(self) -> set[str]:
        """Alerts that fire now."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def rule_errors(self) -> list[str]:
        """What went wrong in the last evaluation of any rule."""
        groups = self._get("/api/v1/rules")["groups"]
        return [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        answer = self._http.get(path, params=parameters)
        answer.raise_for_status()
        data: dict[str, Any] = answer.json()["data"]
        return data


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """One that scrapes `targets` ({job: host:port}) and evaluates the hurried alerts."""
    rules = folder / "alerts.yaml"
    rules.write_text(hurried((MONITORING / "alerts.yaml").read_text()))
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    child = Child("prometheus", command, folder / "prometheus.log", os.environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            asked = Prometheus(http)
            wait_for(asked.ready, 60)
            yield asked
    finally:
        end([child], 15)


def hurried(rules: str) -> str:
    """The rules with every duration shortened."""
    minutes = {"m": 1, "h": 60}

    def shorter(found: re.Match[str]) -> str:
        return f"{int(found[1]) * minutes[found[2]] * _MINUTE_MS}ms"

    return re.sub(r"(?<=[\[ ])(\d+)([mh])(?=[\])\s])", shorter, rules)
