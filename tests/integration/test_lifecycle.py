"""Service processes: what they say and how they end."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from services.local.kafka import LocalKafka, free_ports
from services.local.processes import Child, end
from services.local.run import LOCAL_TOKENIZER
from tests.support.processes import tokenhaul, wait_for


def probe(port: int, path: str) -> tuple[int, str]:
    """Status and text of a probe; status 0 when nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()
    except OSError:
        return 0, ""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Right settings of every service, with a Kafka that is not there."""
    sources = tmp_path / "sources.yaml"
    sources.write_text("sources: [{name: s, files: ['*.jsonl'], max_new_tokens: 8}]")
    metrics, kafka = free_ports(2)
    return {
        "TOKENHAUL_METRICS_PORT": str(metrics),
        "TOKENHAUL_KAFKA_BOOTSTRAP": f"127.0.0.1:{kafka}",
        "TOKENHAUL_INGEST_SOURCES_FILE": str(sources),
        "TOKENHAUL_INGEST_TOKENIZER": str(LOCAL_TOKENIZER),
        "TOKENHAUL_GENERATOR_ENGINES": "http://127.0.0.1:1",
        "TOKENHAUL_SINK_ROOT": str(tmp_path / "out"),
    }


@pytest.mark.parametrize("service", ["ingest", "generate", "sink"])
def test_without_kafka_a_service_waits_and_says_so(service: str, environ: dict[str, str]) -> None:
    port = int(environ["TOKENHAUL_METRICS_PORT"])
    process = tokenhaul(service, **environ)
    waiting = f"waiting for Kafka at {environ['TOKENHAUL_KAFKA_BOOTSTRAP']}"
    wait_for(lambda: probe(port, "/readyz") == (503, waiting), 90)
    assert probe(port, "/livez")[0] == 200
    assert "tokenhaul_build_info" in probe(port, "/metrics")[1]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert f"Kafka at {environ['TOKENHAUL_KAFKA_BOOTSTRAP']} does not answer" in output
    assert "trying again in" in output


@pytest.mark.parametrize(
    ("service", "variable", "value", "message"),
    [
        ("generate", "TOKENHAUL_GENERATOR_WINDOW", "-1", "TOKENHAUL_GENERATOR_WINDOW='-1' is not allowed: it takes an"),
        ("generate", "TOKENHAUL_KAFKA_BOOTSTRAP", "", "TOKENHAUL_KAFKA_BOOTSTRAP is not set: brokers to start from"),
        ("generate", "TOKENHAUL_LOG_FORMAT", "xml", "it takes auto | json | human"),
        ("generate", "TOKENHAUL_GENERATOR_WINDOWS", "8", "TOKENHAUL_GENERATOR_WINDOWS is not a setting of tokenhaul"),
        ("generate", "TOKENHAUL_GENERATOR_ENGINES", "127.0.0.1:1", "a comma-separated list of items like ^(dns"),
        (
            "generate",
            "TOKENHAUL_GENERATOR_ENGINES",
            "http://a:1/generate",
            "TOKENHAUL_GENERATOR_ENGINES='http://a:1/gen",
        ),
        ("sink", "TOKENHAUL_KAFKA_BOOTSTRAP", "kafka:abc", "TOKENHAUL_KAFKA_BOOTSTRAP='kafka:abc' is not allowed"),
        ("sink", "TOKENHAUL_SINK_ON_GAP", "ignore", "it takes stop | continue"),
        ("ingest", "TOKENHAUL_INGEST_TOKENIZER", "/no/where", "TOKENHAUL_INGEST_TOKENIZER='/no/where' is no directory"),
    ],
)
def test_a_wrong_setting_ends_with_2_before_anything_connects(
    service: str, variable: str, value: str, message: str, environ: dict[str, str]
) -> None:
    process = tokenhaul(service, **(environ | {variable: value}))
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 2
    assert message in output
    assert "does not answer" not in output


def test_kafka_going_away_and_coming_back_is_told_by_readyz(tmp_path: Path, environ: dict[str, str]) -> None:
    node = LocalKafka(tmp_path / "kafka")
    node.prepare()
    broker = Child("kafka", node.command, tmp_path / "kafka.log", os.environ)
    try:
        wait_for(node.listens, 60)
        port = int(environ["TOKENHAUL_METRICS_PORT"])
        environ |= {"TOKENHAUL_KAFKA_BOOTSTRAP": node.bootstrap}
        single = ("--replication", "1", "--min-isr", "1")
        made = tokenhaul("topics", "create", "--dataset", "d", "--model", "m", *single, **environ)
        made.communicate(timeout=90)
        service = tokenhaul("generate", **environ)
        wait_for(lambda: probe(port, "/readyz") == (200, "ok"), 90)
        end([broker], 15)
        wait_for(lambda: probe(port, "/readyz") == (503, f"Kafka at {node.bootstrap} does not answer"), 60)
        assert probe(port, "/livez")[0] == 200, "a restart would not bring Kafka back"
        node.prepare()
        broker = Child("kafka", node.command, tmp_path / "kafka.log", os.environ)
        wait_for(lambda: probe(port, "/readyz") == (200, "ok"), 90)
        service.send_signal(signal.SIGTERM)
        output, _ = service.communicate(timeout=90)
        assert "does not answer" in output
        assert "answers again" in output
        assert output.count("\n") < 60, "a line now and then, not hundreds"
    finally:
        end([broker], 15)


def test_until_idle_needs_the_name_of_the_run(environ: dict[str, str]) -> None:
    process = tokenhaul("generate", "--until-idle", **environ)
    output, _ = process.communicate(timeout=90)
    assert (process.returncode, "TOKENHAUL_RUN_ID is not set" in output) == (2, True)


def test_without_topics_a_service_says_which_command_makes_them(broker: str, environ: dict[str, str]) -> None:
    process = tokenhaul("generate", **(environ | {"TOKENHAUL_KAFKA_BOOTSTRAP": broker, "TOKENHAUL_KAFKA_PREFIX": "no"}))
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 3
    assert "no topic no.prompts, no.sequences, no.dead, no.cursors, no.control" in output
    assert "run `tokenhaul topics create` first" in output


def test_a_port_that_is_taken_is_named(broker: str, environ: dict[str, str]) -> None:
    taken = broker.rpartition(":")[2]
    process = tokenhaul("generate", **(environ | {"TOKENHAUL_METRICS_PORT": taken}))
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 3
    assert f"cannot listen on TOKENHAUL_METRICS_HOST:PORT 127.0.0.1:{taken}" in output
