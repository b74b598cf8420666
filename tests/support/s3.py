"""A real S3 server on the loopback address: SeaweedFS."""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.local.kafka import free_ports
from services.local.processes import Child, end
from tests.support.processes import wait_for

BUCKET = "bucket"
_SERVERS = ("master", "volume", "filer", "s3", "admin")


class S3Server:
    """Where it is. It takes any request signed with `environ`'s key."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"

    @property
    def environ(self) -> dict[str, str]:
        """What a client finds in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def fresh_root(self) -> str:
        """A URL nobody has written under yet."""
        return f"s3://{BUCKET}/{time.time_ns()}"


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server that keeps its objects in `folder` and has BUCKET."""
    # Ports of gRPC are derived from these unless they are given.
    ports = iter(free_ports(2 * len(_SERVERS)))
    command = [
        shutil.which("weed", path=sysconfig.get_path("scripts")) or "weed", "mini", "-dir", str(folder),
        "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-bucket", BUCKET, "-webdav=false", "-admin.ui=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock",
    ]  # fmt: skip
    chosen = {name: (next(ports), next(ports)) for name in _SERVERS}
    for name, (http, grpc) in chosen.items():
        command += [f"-{name}.port={http}", f"-{name}.port.grpc={grpc}"]
    server = S3Server(chosen["s3"][0])
    child = Child("seaweedfs", command, folder / "log", os.environ | server.environ)
    try:
        wait_for(lambda: _answers(f"{server.endpoint}/{BUCKET}"), 60)
        yield server
    finally:
        end([child], 0)  # asked to end, it takes half a minute


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 403  # the bucket is there; we gave no key
    except OSError:
        return False
    return True
