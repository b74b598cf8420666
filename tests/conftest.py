"""Real parts shared by the tests: one Apache Kafka and one S3 server for the session."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from hypothesis import settings

from services.kernel import objects
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.local.kafka import LocalKafka
from services.local.processes import Child, end
from tests.support.faulty_s3 import FaultyS3, faulty_s3
from tests.support.processes import end_all
from tests.support.s3 import S3Server, s3_server

# A slow machine is no failure: what takes long is measured by `make bench`, not by tests.
settings.register_profile("tokenhaul", deadline=None)
settings.load_profile("tokenhaul")


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """Also when the test fails."""
    yield
    end_all()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a running Kafka node."""
    folder = tmp_path_factory.mktemp("kafka")
    node = LocalKafka(folder)
    node.prepare()
    child = Child("kafka", node.command, folder / "log", os.environ)
    try:
        deadline = time.monotonic() + 60
        while not node.listens():
            assert time.monotonic() < deadline, f"Kafka did not start: {child.tail()}"
            time.sleep(0.1)
        yield node.bootstrap
    finally:
        end([child], 15)


@pytest.fixture
def kafka(broker: str, request: pytest.FixtureRequest) -> Kafka:
    """Kafka with a topic prefix of this test's own."""
    prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)[:80] + f"-{time.time_ns()}"
    return Kafka(KafkaSettings(bootstrap=[broker], prefix=prefix))


@pytest.fixture(scope="session")
def s3_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(s3_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, and its credentials in the environment."""
    for name, value in s3_session.environ.items():
        monkeypatch.setenv(name, value)
    return s3_session


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Before the S3 server; stores opened now go through it, and wait no longer than a second."""
    monkeypatch.setattr(objects, "_REQUEST", timedelta(seconds=1))
    with faulty_s3(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
