"""A real S3 server with everything that goes wrong before it: one writer is told that it created a key, and it did."""

from __future__ import annotations

import signal
import socket
from contextlib import nullcontext
from typing import get_args

import pytest

from services.kernel import lifecycle
from services.kernel.errors import Fatal, Retry
from services.kernel.objects import open_store
from services.kernel.store import Store, prove
from services.local.kafka import free_ports
from services.sink.service import make
from tests.support.faulty_s3 import Fault, FaultyS3
from tests.support.processes import tokenhaul
from tests.support.s3 import BUCKET, S3Server
from tests.support.stream import eventually, running

FOR_EVER = 1000
CHANGING = [fault for fault in get_args(Fault) if fault not in ("403", "overwrites")]


def content(store: Store, key: str) -> bytes:
    with store.open(key) as file:
        return file.read()


def persistently(store: Store, key: str, data: bytes) -> bool:
    """As the sink does: again, as long as it is not known."""
    for _ in range(5):
        try:
            return store.create(key, data)
        except Retry:
            pass
    raise AssertionError("never known")


@pytest.mark.parametrize("fault", CHANGING)
def test_a_fault_that_passes(fault: Fault, proxy: FaultyS3, s3: S3Server) -> None:
    store = open_store(s3.fresh_root())
    proxy.fail(fault, 2)
    assert persistently(store, "d/a", b"mine")
    assert proxy.met == 2 or fault.endswith("after")
    assert content(store, "d/a") == b"mine"
    proxy.fail(fault, 2)
    assert not persistently(store, "d/a", b"theirs")
    assert content(store, "d/a") == b"mine"


@pytest.mark.parametrize("fault", CHANGING)
def test_a_fault_that_stays_leaves_one_winner(fault: Fault, proxy: FaultyS3, s3: S3Server) -> None:
    store = open_store(s3.fresh_root())
    proxy.fail(fault, FOR_EVER)
    mine = fault.endswith("after")  # then it is there, and can be seen
    with nullcontext() if mine else pytest.raises(Retry, match=rf"store: s3://{BUCKET}/\d+/d/a: "):
        assert store.create("d/a", b"mine")
    proxy.recover()
    assert store.create("d/a", b"theirs") != mine
    assert content(store, "d/a") == (b"mine" if mine else b"theirs")


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("fault", ["500", "reset", "403"])
def test_reading_is_tried_again_and_then_named(method: str, fault: Fault, proxy: FaultyS3, s3: S3Server) -> None:
    store = open_store(s3.fresh_root())
    store.create("d/a", b"mine")
    if fault in ("500", "reset"):
        proxy.fail(fault, 2, method)
        assert content(store, "d/a") == b"mine"
    proxy.fail(fault, FOR_EVER, method)
    with pytest.raises(Retry, match=rf"store: s3://{BUCKET}/\d+/d/a: "):
        content(store, "d/a")
    if method == "GET":
        with pytest.raises(Retry, match=rf"store: s3://{BUCKET}/\d+/d"):
            store.list("d")


def test_an_answer_that_is_lost_and_no_way_to_look(proxy: FaultyS3, s3: S3Server) -> None:
    store = open_store(s3.fresh_root())
    proxy.fail("403", FOR_EVER, "HEAD")
    with pytest.raises(Retry):
        store.create("d/a", b"mine")
    proxy.recover()
    assert store.create("d/a", b"mine")  # the same bytes are the same writer's
    assert not store.create("d/a", b"theirs")


def test_parts_of_an_object_are_read(s3: S3Server) -> None:
    store = open_store(s3.fresh_root())
    store.create("a", bytes(range(100)))
    with store.open("a") as file:
        assert file.seek(-10, 2) == 90
        assert file.read(4) == bytes(range(90, 94))
        assert file.tell() == 94
        assert file.read() == bytes(range(94, 100))
        assert file.read(1) == b""
        file.seek(50)
        buffer = bytearray(3)
        assert file.readinto(buffer) == 3  # type: ignore[attr-defined]
        assert buffer == bytes([50, 51, 52])
    with pytest.raises(Retry, match="not found"):
        store.open("b")


def test_who_may_only_create_can_prove_it(proxy: FaultyS3, s3: S3Server) -> None:
    proxy.fail("403", FOR_EVER, "DELETE")
    prove(open_store(s3.fresh_root()))


def test_a_server_that_overwrites_is_found_out_at_the_start(
    proxy: FaultyS3, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.fail("overwrites", FOR_EVER)
    assert start_sink(root := s3.fresh_root()) == 2
    assert f"TOKENHAUL_SINK_ROOT='{root}' is not usable" in (printed := capsys.readouterr().err)
    assert "it lets the same file be created twice" in printed


def test_a_root_of_no_known_kind_is_a_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_sink("ftp://x") == 2
    assert "TOKENHAUL_SINK_ROOT='ftp://x' is not usable: 'ftp://x' is neither a dir" in capsys.readouterr().err


def test_a_store_without_a_right_for_us_is_a_wrong_setting(
    proxy: FaultyS3, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.fail("403", FOR_EVER)
    assert start_sink(s3.fresh_root()) == 2
    assert "is not usable" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["503", "reset", "hangs"])
async def test_a_store_that_is_away_at_the_start_is_waited_for(
    fault: Fault, proxy: FaultyS3, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    sink = make({"TOKENHAUL_KAFKA_BOOTSTRAP": "127.0.0.1:1", "TOKENHAUL_SINK_ROOT": (root := s3.fresh_root())})
    proxy.fail(fault, FOR_EVER)
    async with running(sink) as (context, _):
        await eventually(lambda: f"the store at {root} gives no answer" in caplog.text)
        assert context.health.not_ready == f"waiting for the store at {root}"
        proxy.recover()
        await eventually(lambda: "Kafka at 127.0.0.1:1 does not answer" in caplog.text)


def test_a_stop_does_not_wait_for_a_store_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        sink = tokenhaul(
            "sink",
            TOKENHAUL_KAFKA_BOOTSTRAP="127.0.0.1:1",
            TOKENHAUL_SINK_ROOT=f"s3://{BUCKET}/x",
            TOKENHAUL_METRICS_PORT=str(free_ports(1)[0]),
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
            AWS_ACCESS_KEY_ID="key",
            AWS_SECRET_ACCESS_KEY="secret",
        )
        connection, _ = silent.accept()
        with connection:
            sink.send_signal(signal.SIGTERM)
            output, _ = sink.communicate(timeout=60)  # the request itself would take minutes
    assert sink.returncode == 0, output


def start_sink(root: str) -> int:
    """Its exit status."""
    environ = {
        "TOKENHAUL_KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "TOKENHAUL_SINK_ROOT": root,
        "TOKENHAUL_METRICS_PORT": str(free_ports(1)[0]),
    }
    return lifecycle.run(make, environ, until_idle=False)


@pytest.mark.parametrize("root", ["s3://", "s3:///x", "ftp://host/x", "s3://a:b/x", "s3://bucket/x?y=1"])
def test_a_root_that_is_none(root: str) -> None:
    with pytest.raises(Fatal, match="is neither a directory nor s3://bucket/prefix"):
        open_store(root)


@pytest.mark.parametrize("root", ["s3://key:secret@bucket/x", "s3://key:a/secret@bucket/x", "ftp://secret@bucket/x"])
def test_a_root_with_a_password_is_refused_without_it(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start_sink(root) == 2
    printed = capsys.readouterr().err
    assert f"TOKENHAUL_SINK_ROOT='{root.partition(':')[0]}://***@bucket/x' is not usable" in printed
    assert "AWS_SECRET_ACCESS_KEY" in printed
    assert "secret@" not in printed


def test_an_endpoint_with_a_password_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:secret@host:1")
    with pytest.raises(
        Fatal, match=r"AWS_ENDPOINT_URL='http://\*\*\*@host:1' has a user or a password in it"
    ) as refused:
        open_store("s3://bucket/x")
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("root", ["gs://bucket/prefix", "az://container/prefix"])
def test_other_clouds_are_known_by_name(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server of theirs is in the tests: this holds only that the library takes the name."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_store(root).name("a") == f"{root}/a"
