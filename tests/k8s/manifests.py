"""What `kubectl apply -k` would send, built without a cluster."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
K8S = ROOT / "k8s"
MONITORING = K8S / "components" / "monitoring"
Manifest = dict[str, Any]


@functools.cache
def build(folder: Path) -> list[Manifest]:
    """Every object of a kustomization."""
    kubectl = Path(sys.executable).parent / "kubectl"
    made = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert not made.stderr, made.stderr
    return [manifest for manifest in yaml.safe_load_all(made.stdout) if manifest]


def overlay(name: str) -> list[Manifest]:
    """Every object of an overlay."""
    return build(K8S / "overlays" / name)


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The object of that kind and name."""
    (found,) = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    """Deployments and StatefulSets."""
    return [each for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]


def needs(tool: str) -> None:
    """Skip where Debian's package prometheus is not installed; in CI that is a failure."""
    if shutil.which(tool) is None and not os.environ.get("CI"):
        pytest.skip(f"{tool} is not installed (apt install prometheus)")


def promtool(*arguments: object) -> str:
    """What `promtool ...` says."""
    needs("promtool")
    told = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout
