"""Apache Kafka as it is run in earnest: three nodes (or one), with TLS and SASL where asked for.

    with Cluster(folder) as cluster:
        cluster.kill(2); cluster.start(2); cluster.freeze(1); cluster.thaw(1)

Every node is broker and controller (KRaft), on loopback, from the jars of services/local/kafka.py.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import msgspec
import trustme
from cryptography.hazmat.primitives import serialization

from services.local.kafka import free_ports, jars
from services.local.processes import Child, end

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
USER, PASSWORD = "hauler", "correct-horse-battery"
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


class Cluster:
    """`nodes` brokers; clients use `protocol`, the brokers among themselves PLAINTEXT. `extra` are broker settings."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        protocol: Protocol = "PLAINTEXT",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = range(1, nodes + 1)
        self.ca_file = folder / "ca.pem"
        self._folder, self._protocol, self._extra = folder, protocol, dict(extra or {})
        ports = free_ports(3 * nodes)
        self._ports_of = {node: (ports.pop(), ports.pop(), ports.pop()) for node in self.nodes}
        self._children: dict[int, Child] = {}
        self._frozen: set[int] = set()
        self._stopping: set[int] = set()
        self._tools: list[Child] = []

    @property
    def bootstrap(self) -> list[str]:
        """Where clients start from."""
        return [f"127.0.0.1:{client}" for client, _, _ in self._ports_of.values()]

    def __enter__(self) -> Self:
        self._prepare()
        try:
            for node in self.nodes:
                self.start(node)
            for node in self.nodes:
                self.wait(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in list(self._frozen):
            self.thaw(node)
        end([*self._tools, *self._children.values()], 15)

    def start(self, node: int) -> None:
        """Start a node, for the first time or again."""
        self._stopping.discard(node)
        command = [
            "java", "-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{jars()}/*",
            "kafka.Kafka", str(self._properties(node)),
        ]  # fmt: skip
        self._children[node] = Child(f"kafka-{node}", command, self._folder / f"node{node}.log", os.environ)

    def wait(self, node: int) -> None:
        """Until the node takes clients."""
        deadline = time.monotonic() + _START_SECONDS
        port = self._ports_of[node][0]
        while not _listens(port):
            assert time.monotonic() < deadline, f"node {node} did not start: {self._children[node].tail()}"
            time.sleep(0.1)

    def stop(self, node: int) -> None:
        """Ask for a clean stop, as for maintenance; it hands its partitions over first, which takes its time."""
        self.signal(node, signal.SIGTERM)
        self._stopping.add(node)

    def kill(self, node: int) -> None:
        """kill -9."""
        self.signal(node, signal.SIGKILL)
        self._children[node].wait_or_kill(time.monotonic() + 10)

    def freeze(self, node: int) -> None:
        """SIGSTOP: its connections stay open, nobody answers."""
        self.signal(node, signal.SIGSTOP)
        self._frozen.add(node)

    def thaw(self, node: int) -> None:
        """SIGCONT."""
        self.signal(node, signal.SIGCONT)
        self._frozen.discard(node)

    def runs(self, node: int) -> bool:
        """Whether its process is there, awake or not."""
        return self._children[node].status is None

    def heal(self) -> None:
        """Whatever was done to the nodes: afterwards all run and take clients."""
        for node in self.nodes:
            if node in self._frozen:
                self.thaw(node)
            if node in self._stopping:
                self._children[node].wait_or_kill(time.monotonic() + _STOP_SECONDS)
            if not self.runs(node):
                self.start(node)
        for node in self.nodes:
            self.wait(node)

    def signal(self, node: int, number: signal.Signals) -> None:
        """Any other signal."""
        os.kill(self._children[node].pid, number)

    def tool(self, name: str, *arguments: str) -> str:
        """Run one of Kafka's command-line tools against the cluster; its output."""
        return tool(self.bootstrap, name, *arguments)

    def move(self, assignment: Mapping[tuple[str, int], list[int]]) -> None:
        """Give partitions other replicas (the first of them the preferred leader); returns when Kafka took it on."""
        plan = {
            "version": 1,
            "partitions": [{"topic": t, "partition": p, "replicas": nodes} for (t, p), nodes in assignment.items()],
        }
        path = self._folder / "move.json"
        path.write_bytes(msgspec.json.encode(plan))
        self.tool("reassign.ReassignPartitionsCommand", "--reassignment-json-file", str(path),
                  "--execute")  # fmt: skip

    def elect_preferred(self) -> None:
        """Ask for every partition's first replica to lead it again; nobody waits for it."""
        self._tools.append(
            Child(
                "elect",
                _tool(
                    self.bootstrap, "LeaderElectionCommand", "--election-type", "PREFERRED", "--all-topic-partitions"
                ),
                self._folder / "tools.log",
                os.environ,
            )
        )

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        _write_key_store(authority.issue_cert("127.0.0.1", "localhost"), self._folder / "server.pem")
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        formatting = []
        for node in self.nodes:
            path = self._properties(node)
            path.write_text(self._configuration(node))
            command = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{jars()}/*", "kafka.tools.StorageTool",
                       "format", f"--cluster-id={cluster_id}", f"--config={path}"]  # fmt: skip
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["--add-scram", f"{mechanism}=[name={USER},password={PASSWORD}]"]
            formatting.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for process in formatting:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output

    def _properties(self, node: int) -> Path:
        return self._folder / f"node{node}.properties"

    def _configuration(self, node: int) -> str:
        client, inner, controller = self._ports_of[node]
        replicas = len(self.nodes)
        least = max(1, replicas - 1)
        settings = {
            "process.roles": "broker,controller",
            "node.id": str(node),
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{self._ports_of[n][2]}" for n in self.nodes),
            "listeners": f"CLIENT://127.0.0.1:{client},INNER://127.0.0.1:{inner},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"CLIENT://127.0.0.1:{client},INNER://127.0.0.1:{inner}",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,INNER:PLAINTEXT,CLIENT:{self._protocol}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "INNER",
            "log.dirs": str(self._folder / f"data{node}"),
            "offsets.topic.replication.factor": str(replicas),
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": str(replicas),
            "transaction.state.log.min.isr": str(least),
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": str(replicas),
            "share.coordinator.state.topic.min.isr": str(least),
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            "auto.create.topics.enable": "false",
            "replica.lag.time.max.ms": "4000",
            "broker.session.timeout.ms": "4000",
            "broker.heartbeat.interval.ms": "1000",
            "unclean.leader.election.enable": "false",
            **self._extra,
        }
        if self._protocol.endswith("SSL"):
            settings |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(self._folder / "server.pem"),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.ca_file),
            }
        if self._protocol.startswith("SASL"):
            login = f'required username="{USER}" password="{PASSWORD}"'
            settings |= {
                "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
                "listener.name.client.plain.sasl.jaas.config": f'{_PLAIN} {login} user_{USER}="{PASSWORD}";',
                "listener.name.client.scram-sha-256.sasl.jaas.config": f"{_SCRAM} required;",
                "listener.name.client.scram-sha-512.sasl.jaas.config": f"{_SCRAM} required;",
            }
        return "".join(f"{name}={value}\n" for name, value in settings.items())


def tool(bootstrap: list[str], name: str, *arguments: str) -> str:
    """Run one of Kafka's command-line tools (a class below org.apache.kafka.tools); its output."""
    result = subprocess.run(
        _tool(bootstrap, name, *arguments), capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _tool(bootstrap: list[str], name: str, *arguments: str) -> list[str]:
    return [
        "java", "-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", f"{jars()}/*",
        f"org.apache.kafka.tools.{name}", "--bootstrap-server", ",".join(bootstrap), *arguments,
    ]  # fmt: skip


def _write_key_store(issued: trustme.LeafCert, path: Path) -> None:
    """Key and certificates in one PEM file; Kafka takes the key as PKCS#8 only."""
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    parts = [
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        *(certificate.bytes() for certificate in issued.cert_chain_pems),
    ]
    path.write_bytes(b"".join(parts))


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
