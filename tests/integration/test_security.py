"""Strangers: TLS and SASL to a real Kafka, TLS and a key to engines, and no secret where people look."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import generate_latest

from schemas.sequences import Sequence
from services.generator import service
from services.kernel.errors import SettingsError
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.security import connection, why_refused
from services.kernel.settings import load
from services.local.kafka import free_ports
from services.local.run import LOCAL_TOKENIZER
from services.sink.verify import verify
from tests.support.cluster import PASSWORD, USER, Cluster
from tests.support.fake_engine import FakeEngine
from tests.support.processes import fake_engine, tokenhaul
from tests.support.stream import create_topics, eventually, make_prompt, mark_idle, publish, read_outcomes, running

KAFKA = "TOKENHAUL_KAFKA_"
KEY = "a-key-nobody-may-see"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker that takes nothing but TLS with a user and a password."""
    with Cluster(tmp_path_factory.mktemp("closed"), nodes=1, protocol="SASL_SSL") as cluster:
        yield cluster


def settings(cluster: Cluster, **more: str) -> dict[str, str]:
    return {
        f"{KAFKA}BOOTSTRAP": ",".join(cluster.bootstrap),
        f"{KAFKA}SECURITY_PROTOCOL": "SASL_SSL",
        f"{KAFKA}SASL_USERNAME": USER,
        f"{KAFKA}SASL_PASSWORD": PASSWORD,
        f"{KAFKA}SSL_CA_FILE": str(cluster.ca_file),
    } | {KAFKA + name: value for name, value in more.items()}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_the_pipeline_s_clients_work_over_tls_and_sasl(closed: Cluster, mechanism: str) -> None:
    environ = settings(closed, SASL_MECHANISM=mechanism, PREFIX=f"sasl-{mechanism}".lower())
    kafka = Kafka(load(KafkaSettings, environ))
    await create_topics(kafka)
    prompts = [make_prompt(number) for number in range(20)]
    await publish(kafka, prompts)
    await mark_idle(kafka, "run")
    async with FakeEngine() as engine:
        generator = service.make(environ | {"TOKENHAUL_GENERATOR_ENGINES": engine.url})
        async with running(generator, "run") as (_, task):
            await asyncio.wait_for(task, 90)
    assert {outcome.record_id for outcome in await read_outcomes(kafka)} == {prompt.id for prompt in prompts}


def test_a_run_on_one_machine_speaks_to_kafka_as_its_services_do(closed: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(f'{{"prompt": "Tell me about {number}."}}\n' for number in range(6)))
    environ = {name: value for name, value in settings(closed).items() if not name.endswith("BOOTSTRAP")}
    with fake_engine(tmp_path) as (url, _):
        run = tokenhaul(
            "run", file, "--max-new-tokens", 8, "--engine", url, "--tokenizer", LOCAL_TOKENIZER, "--model", "fake",
            "--kafka", closed.bootstrap[0], "--out", tmp_path / "out", **environ,
        )  # fmt: skip
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert verify(tmp_path / "out").rows == 6
    assert PASSWORD not in output


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SASL_PASSWORD": "wrong-horse"}, "SASL: "),
        ({"SSL_CA_FILE": ""}, "TLS: "),
    ],
)
def test_a_service_says_what_the_broker_objects_to_and_shows_no_password_on_any_page(
    closed: Cluster, change: dict[str, str], told: str
) -> None:
    (port,) = free_ports(1)
    environ = settings(closed, **change) | {
        "TOKENHAUL_METRICS_PORT": str(port),
        "TOKENHAUL_GENERATOR_ENGINES": "http://127.0.0.1:1",
        "TOKENHAUL_GENERATOR_API_KEY": KEY,
        "TOKENHAUL_LOG_LEVEL": "debug",
    }
    process = tokenhaul("generate", **environ)
    assert process.stdout is not None
    lines: list[str] = []
    while not any("trying again in" in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], "ended: " + "".join(lines)
    pages = [httpx.get(f"http://127.0.0.1:{port}/{page}").text for page in ("metrics", "readyz", "livez", "")]
    process.terminate()
    output = "".join([*pages, *lines, process.communicate(timeout=60)[0]])
    assert "tokenhaul_retries_total" in pages[0]
    assert told in output
    assert environ[f"{KAFKA}SASL_PASSWORD"] not in output
    assert KEY not in output


async def test_a_certificate_for_another_host_is_refused_and_said(tmp_path: Path) -> None:
    """Whatever listens there, nothing is sent to it: the handshake is all it sees."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("broker.example").configure_cert(context)
    met: list[bytes] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(await reader.read(1))
        writer.close()

    async with await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        given = load(
            KafkaSettings,
            {f"{KAFKA}BOOTSTRAP": address, f"{KAFKA}SECURITY_PROTOCOL": "SSL",
             f"{KAFKA}SSL_CA_FILE": str(tmp_path / "ca.pem")},
        )  # fmt: skip
        told = await why_refused({"bootstrap_servers": [address], **connection(given)})
    assert told == "TLS: IP address mismatch, certificate is not valid for '127.0.0.1'."
    assert not any(met)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"SECURITY_PROTOCOL": "TLS"}, "it takes PLAINTEXT | SSL | SASL_PLAINTEXT | SASL_SSL"),
        ({"SECURITY_PROTOCOL": "SASL_SSL"}, "TOKENHAUL_KAFKA_SASL_PASSWORD is not set, but the protocol is SASL_SSL"),
        ({"SASL_PASSWORD": PASSWORD}, "TOKENHAUL_KAFKA_SASL_PASSWORD is set, but the protocol is PLAINTEXT"),
        ({"SSL_CA_FILE": "ca.pem"}, "TOKENHAUL_KAFKA_SSL_CA_FILE is set, but the protocol is PLAINTEXT"),
        ({"SECURITY_PROTOCOL": "SSL", "SSL_CA_FILE": "no.pem"}, "TOKENHAUL_KAFKA_SSL_CA_FILE='no.pem' cannot be used"),
        ({"SECURITY_PROTOCOL": "SSL", "SSL_CERT_FILE": "c.pem"}, "SSL_KEY_FILE must be set together"),
    ],
)
def test_security_settings_that_do_not_fit_are_refused(given: dict[str, str], told: str) -> None:
    environ = {f"{KAFKA}BOOTSTRAP": "127.0.0.1:1"} | {KAFKA + name: value for name, value in given.items()}
    with pytest.raises(SettingsError) as refused:
        Kafka(load(KafkaSettings, environ))
    assert told in str(refused.value)
    assert PASSWORD not in str(refused.value)


def test_no_repr_shows_a_secret() -> None:
    read = load(KafkaSettings, {f"{KAFKA}BOOTSTRAP": "a:1", f"{KAFKA}SASL_PASSWORD": PASSWORD})
    assert PASSWORD not in repr(read)
    assert "***" in repr(read)
    assert read.sasl_password.reveal() == PASSWORD


@web.middleware
async def asks_for_the_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """As a server started with --api-key: everything but its health is closed."""
    if request.path in ("/health", "/ready") or request.headers.get("Authorization") == f"Bearer {KEY}":
        return await handler(request)
    return web.json_response({"error": "Unauthorized"}, status=401)


async def test_an_engine_behind_tls_and_a_key(kafka: Kafka, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    await create_topics(kafka)
    await publish(kafka, [make_prompt(number) for number in range(20)])
    await mark_idle(kafka, "run")
    engine = FakeEngine()
    engine.app.middlewares.append(asks_for_the_key)
    async with engine:
        (port,) = free_ports(1)
        await web.TCPSite(engine.runner, "127.0.0.1", port, ssl_context=context).start()
        environ = {
            f"{KAFKA}BOOTSTRAP": kafka.address,
            f"{KAFKA}PREFIX": kafka.settings.prefix,
            "TOKENHAUL_GENERATOR_ENGINES": f"https://127.0.0.1:{port}",
            "TOKENHAUL_GENERATOR_CA_FILE": str(tmp_path / "ca.pem"),
        }
        caplog.set_level("DEBUG")
        async with running(service.make(environ), "run"):
            await eventually(lambda: "answered 401: is TOKENHAUL_GENERATOR_API_KEY right?" in caplog.text)
            assert not engine.started, "it got in without the key"
        generator = service.make(environ | {"TOKENHAUL_GENERATOR_API_KEY": KEY})
        async with running(generator, "run") as (_, task):
            await asyncio.wait_for(task, 90)
    assert "is ready" in caplog.text
    assert KEY not in caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert KEY not in generate_latest(generator.metrics.registry).decode()
    outcomes = await read_outcomes(kafka)
    assert len(outcomes) == 20
    assert all(isinstance(outcome, Sequence) for outcome in outcomes)
