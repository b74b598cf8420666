"""One Apache Kafka node (KRaft) on free loopback ports: jars by Maven into the user's cache, data in a given folder.

A node that is started again on its folder keeps its data, and its ports unless somebody else has taken them.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

from services.kernel.errors import Fatal, SettingsError

_POM = Path(__file__).with_name("pom.xml")
_JAVA_VERSION = 17
_PORTS = re.compile(r"^listeners=PLAINTEXT://127\.0\.0\.1:(\d+),CONTROLLER://127\.0\.0\.1:(\d+)$", re.MULTILINE)
_WITHOUT = (
    "or `docker compose up -d kafka`, or take a Kafka of yours (make demo KAFKA=host:port, run --kafka host:port)"
)


def jars() -> Path:
    """The folder with Kafka's jars, filled by Maven the first time. Raises Fatal saying what is missing."""
    _require_java()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenhaul"
    target = cache / f"kafka-{hashlib.sha256(_POM.read_bytes()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    maven = shutil.which("mvn")
    if maven is None:
        raise Fatal(f"Maven is not installed, it fetches Kafka: install Maven (apt install maven), {_WITHOUT}")
    cache.mkdir(parents=True, exist_ok=True)
    # Maven writes beside the cache first: a folder that is there is complete.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        out = Path(scratch) / "jars"
        result = subprocess.run(
            [maven, "-q", "-B", "-f", str(_POM), "dependency:copy-dependencies", "-DincludeScope=runtime",
             f"-DoutputDirectory={out}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode:
            raise Fatal(f"Maven could not fetch Kafka:\n{(result.stdout + result.stderr)[-2000:]}")
        try:
            out.rename(target)
        except OSError:
            if not target.is_dir():  # somebody else was faster, which is as well
                raise
    return target


def _require_java() -> None:
    java = shutil.which("java")
    found = "there is none"
    if java is not None:
        version = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
        match = re.search(r'version "(\d+)', version)
        if match and int(match[1]) >= _JAVA_VERSION:
            return
        found = f"{java} is {match[1] if match else 'of an unknown version'}"
    raise Fatal(
        f"Kafka needs Java {_JAVA_VERSION} or newer, {found}: install it (apt install openjdk-17-jre-headless), "
        f"{_WITHOUT}"
    )


class LocalKafka:
    """A node with its data in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._properties = folder / "server.properties"
        self._lock: int | None = None

    def prepare(self, port: int | None = None) -> None:
        """Get the jars, write the configuration, and format the data folder unless that was done before. It listens on
        `port`, or on one that is free. The folder is this process's until it ends. Raises SettingsError when another
        has the folder, or listens on `port`."""
        self._classpath = f"{jars()}/*"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._take_folder()
        formatted = self._properties.exists()
        ports = _PORTS.findall(self._properties.read_text())[0] if formatted else free_ports(2)
        if port is not None:
            if not _is_free(port):
                raise SettingsError(f"port {port} of 127.0.0.1 is taken: name another one")
            ports = port, free_ports(1)[0]
        elif not all(map(_is_free, ports)):
            ports = free_ports(2)
        # Written anew every time: the folder may have been moved.
        draft = self._folder / "server.properties.new"
        draft.write_text(_configuration(self._folder / "data", *ports))
        if not formatted:
            self._format(draft)
        draft.rename(self._properties)

    def _take_folder(self) -> None:
        """Kafka has a lock of its own, but takes it after it has joined the other node's quorum, which harms that."""
        if self._lock is not None:
            return
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise SettingsError(
                f"another Kafka node runs on {self._folder}: stop it first, or take another folder"
            ) from error
        os.set_inheritable(lock, True)  # whoever becomes the node (exec) keeps it
        self._lock = lock

    def _format(self, properties: Path) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        result = subprocess.run(
            ["java", "-cp", self._classpath, "kafka.tools.StorageTool", "format",
             f"--cluster-id={cluster}", f"--config={properties}", "--standalone"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode:
            raise Fatal(f"Kafka's data folder cannot be formatted:\n{(result.stdout + result.stderr)[-2000:]}")

    @property
    def bootstrap(self) -> str:
        """host:port to connect to."""
        match = re.search(r"^advertised\.listeners=PLAINTEXT://(.*)$", self._properties.read_text(), re.MULTILINE)
        assert match is not None
        return match[1]

    def listens(self) -> bool:
        """Whether it takes connections."""
        host, _, port = self.bootstrap.partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    @property
    def command(self) -> list[str]:
        """What starts the node in the foreground; SIGTERM stops it cleanly."""
        return [
            "java", "-Xms256m", "-Xmx512m", "-XX:+UseG1GC", "-XX:G1HeapRegionSize=4m",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", self._classpath,
            "kafka.Kafka", str(self._properties),
        ]  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _is_free(port: int | str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Kafka does: a port just left is free
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError:
            return False
    return True


def _configuration(data: Path, port: int | str, controller_port: int | str) -> str:
    return f"""\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""
