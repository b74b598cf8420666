"""Every overlay, as a cluster would get it: valid, complete, and with settings the services accept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.cli import SETTINGS
from services.generator.settings import GeneratorSettings
from services.ingest.settings import IngestSettings
from services.kernel import topics
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import ProcessSettings
from services.kernel.settings import Settings, load, refuse_unknown
from services.sink.settings import SinkSettings
from tests.k8s.custom_resources import SPECS, unknown_keys
from tests.k8s.manifests import K8S, Manifest, build, one, overlay, workloads

VERSION = "1.37"
SERVICES: dict[str, type[Settings]] = {
    "tokenhaul-ingest": IngestSettings,
    "tokenhaul-generator": GeneratorSettings,
    "tokenhaul-sink": SinkSettings,
}


def variant(folder: Path, *components: str) -> list[Manifest]:
    """The production overlay with more components."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "overlays" / "prod", folder.resolve())],
        "components": [os.path.relpath(K8S / "components" / name, folder.resolve()) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return build(folder)


@pytest.fixture(params=["dev", "prod", "prod with all the rest"])
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    if request.param in ("dev", "prod"):
        return overlay(request.param)
    return variant(tmp_path, "sglang-router", "tokenizer-pvc", "push-api")


def test_every_object_is_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if allowed := SPECS.get((manifest["apiVersion"], manifest["kind"])):
            assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
            assert not unknown_keys(manifest["spec"], allowed), manifest["metadata"]["name"]
        else:
            # Raises for a kind it does not know: a custom resource must have its list of keys above.
            kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_dev_needs_no_custom_resources() -> None:
    assert not [each["kind"] for each in overlay("dev") if (each["apiVersion"], each["kind"]) in SPECS]


def references(pod: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, name) of what a pod cannot start without."""
    for container in pod["containers"] + pod.get("initContainers", []):
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                yield "ConfigMap", source["configMapRef"]["name"]
    for volume in pod.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
    if "serviceAccountName" in pod:
        yield "ServiceAccount", pod["serviceAccountName"]


def test_what_pods_refer_to_is_there(manifests: list[Manifest]) -> None:
    there = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    for workload in workloads(manifests):
        pod = workload["spec"]["template"]["spec"]
        assert set(references(pod)) <= there, workload["metadata"]["name"]
        mounts = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])}
        claimed = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        assert mounts <= {volume["name"] for volume in pod.get("volumes", [])} | claimed


def environment(manifests: list[Manifest], container: dict[str, Any]) -> dict[str, str]:
    """What the process sees; a secret is some text, a pod's name its own."""
    maps = {each["metadata"]["name"]: each.get("data", {}) for each in manifests if each["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]] if "configMapRef" in source else {}
    for variable in container.get("env", []):
        found[variable["name"]] = variable.get("value", "from-elsewhere")
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_the_services_accept_their_settings(
    manifests: list[Manifest], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workload,) = [each for each in workloads(manifests) if each["metadata"]["name"] == service]
    pod = workload["spec"]["template"]["spec"]
    environ = environment(manifests, pod["containers"][0])
    refuse_unknown(environ, SETTINGS)
    process, kafka = load(ProcessSettings, environ), load(KafkaSettings, environ)
    settings = load(SERVICES[service], environ)
    if isinstance(settings, IngestSettings):
        ports = {port["containerPort"] for port in pod["containers"][0]["ports"]}
        assert ports == {9464, settings.http_port or 9464}
        assert bool(settings.http_token) == bool(settings.http_port), "open to others without a token"
    assert (process.metrics_host, process.metrics_port) == ("0.0.0.0", 9464)
    assert process.drain_seconds + 30 <= pod["terminationGracePeriodSeconds"], "killed before it has drained"
    assert bool(kafka.instance) == (workload["kind"] == "StatefulSet"), "static members need names that come back"
    for container in pod["initContainers"]:
        refuse_unknown(environment(manifests, container), SETTINGS)
        for argument in container.get("args", []):
            if argument.startswith("--") and "$(" in argument:
                name = argument.partition("$(")[2].rstrip(")")
                assert name in environment(manifests, container), f"{service}: {argument} stands for nothing"


@pytest.mark.parametrize("service", SERVICES)
def test_the_services_run_with_the_least_there_is(manifests: list[Manifest], service: str) -> None:
    (workload,) = [each for each in workloads(manifests) if each["metadata"]["name"] == service]
    pod = workload["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "Kubernetes' own TOKENHAUL_... variables"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"] + pod["initContainers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]["limits"]) == {"memory"}, "a limit of CPU would throttle the event loop"
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    (container,) = pod["containers"]
    assert [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")] == [
        "/readyz",
        "/readyz",
        "/livez",
    ]
    budget = one(manifests, "PodDisruptionBudget", service)["spec"]
    assert budget["selector"] == workload["spec"]["selector"]


def test_a_sink_has_the_time_to_load_its_chains(manifests: list[Manifest]) -> None:
    (container,) = one(manifests, "StatefulSet", "tokenhaul-sink")["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600, "it would be restarted, and begin anew, for ever"


def test_only_one_ingest_runs_at_a_time(manifests: list[Manifest]) -> None:
    ingest = one(manifests, "Deployment", "tokenhaul-ingest")["spec"]
    assert (ingest["replicas"], ingest["strategy"]) == (1, {"type": "Recreate"})


def test_keda_scales_engines_and_nothing_else() -> None:
    manifests = overlay("prod")
    (scaled,) = [each for each in manifests if each["kind"] == "ScaledObject"]
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "sglang")
    fixed = {each["metadata"]["name"]: each["spec"].get("replicas") for each in workloads(manifests)}
    assert fixed == {"sglang": None, "tokenhaul-ingest": 1, "tokenhaul-generator": 2, "tokenhaul-sink": 2}
    names = Kafka(KafkaSettings(bootstrap=["kafka:9092"])).topics
    metadata = scaled["spec"]["triggers"][0]["metadata"]
    assert (metadata["topic"], metadata["consumerGroup"]) == (names.prompts, names.generator_group)
    assert all(isinstance(value, str) for value in metadata.values())


def test_strimzi_makes_the_topics_the_services_want() -> None:
    manifests = overlay("prod")
    (dataset,) = [e["data"] for e in manifests if e["kind"] == "ConfigMap" and "PARTITIONS" in e.get("data", {})]
    kafka = Kafka(KafkaSettings(bootstrap=["kafka:9092"]))
    made = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "KafkaTopic"}
    wanted = topics.required(kafka, int(dataset["PARTITIONS"]))
    assert made.keys() == wanted.keys()
    for name, (partitions, config) in wanted.items():
        spec = made[name]
        assert (spec["partitions"], str(spec["replicas"])) == (partitions, dataset["REPLICATION"])
        assert {key: str(value) for key, value in spec["config"].items()} == {
            **config,
            "min.insync.replicas": dataset["MIN_ISR"],
        }


@pytest.mark.parametrize(
    ("tool", "user", "reads", "writes"),
    [
        ("status", "tokenhaul-sink", {"control", "cursors", "dead"}, set()),
        ("verify --audit", "tokenhaul-sink", {"control", "prompts", "sequences"}, set()),
        ("regenerate", "tokenhaul-sink", {"control"}, {"control"}),
        ("dead replay", "tokenhaul-ingest", {"control", "dead"}, {"control"}),
    ],
)
def test_tools_may_do_their_work_where_they_are_run(tool: str, user: str, reads: set[str], writes: set[str]) -> None:
    """In the pods that docs/operations.md names; what needs shards must run where the store is known."""
    acls = one(overlay("prod"), "KafkaUser", user)["spec"]["authorization"]["acls"]
    granted = {acl["resource"]["name"].rpartition(".")[2]: acl for acl in acls if acl["resource"]["type"] == "topic"}
    for operation, names in (("Read", reads), ("Write", writes)):
        assert names <= {name for name, acl in granted.items() if operation in acl["operations"]}, (tool, operation)


def test_pod_monitors_find_pods_and_ports() -> None:
    manifests = overlay("prod")
    found = {}
    for monitor in (each["spec"] for each in manifests if each["kind"] == "PodMonitor"):
        names = set(monitor["selector"].get("matchLabels", {}).values())
        names |= {name for each in monitor["selector"].get("matchExpressions", []) for name in each["values"]}
        for name in names:
            (workload,) = [e for e in workloads(manifests) if e["metadata"]["name"] == name]
            template = workload["spec"]["template"]
            assert template["metadata"]["labels"]["app.kubernetes.io/name"] == name
            ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
            found[name] = monitor["jobLabel"]
    assert found == dict.fromkeys([*SERVICES, "sglang"], "app.kubernetes.io/name")


def test_a_router_retries_nothing(tmp_path: Path) -> None:
    router = one(variant(tmp_path, "sglang-router"), "Deployment", "sglang-router")
    assert "--disable-retries" in router["spec"]["template"]["spec"]["containers"][0]["args"]


def test_engines_admit_all_who_ask_them(tmp_path: Path) -> None:
    manifests = variant(tmp_path, "sglang-router")
    pods = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in workloads(manifests)}
    (rule,) = one(manifests, "NetworkPolicy", "sglang")["spec"]["ingress"]
    admitted = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    for who in ("sglang-router", "tokenhaul-generator", "tokenhaul-ingest"):
        assert any(peer.items() <= pods[who].items() for peer in admitted), who


def test_every_component_is_part_of_some_overlay_that_is_checked() -> None:
    checked = {"sglang-router", "tokenizer-pvc", "push-api"}
    for name in ("dev", "prod"):
        listed = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())["components"]
        checked |= {Path(component).name for component in listed}
    assert checked == {folder.name for folder in (K8S / "components").iterdir()}
