"""`tokenhaul kafka` as a user starts and stops it."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

from services.local.kafka import free_ports
from tests.support.processes import tokenhaul, wait_for


def test_a_second_node_on_the_same_folder_is_refused_and_the_first_stops_as_ever(tmp_path: Path) -> None:
    (port, other) = free_ports(2)
    first = tokenhaul("kafka", "--data", tmp_path / "kafka", "--port", port)
    wait_for(lambda: _listens(port), 90)
    second = tokenhaul("kafka", "--data", tmp_path / "kafka", "--port", other)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert re.fullmatch(rf"tokenhaul: another Kafka node runs on {tmp_path}/kafka: .*\n", output), output
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode in (0, 143)
    again = tokenhaul("kafka", "--data", tmp_path / "kafka", "--port", port)
    wait_for(lambda: _listens(port), 90)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
