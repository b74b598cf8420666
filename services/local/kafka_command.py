"""`tokenhaul kafka`: one Kafka node on this machine, in the foreground, for trying the services without a container."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from services.kernel.errors import SettingsError, TokenhaulError
from services.local.kafka import LocalKafka


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul kafka`."""
    parser.add_argument("--data", type=Path, default=Path("out/kafka"), metavar="DIR", help="(default %(default)s)")
    parser.add_argument("--port", type=int, default=9092, metavar="N", help="on 127.0.0.1 (default %(default)s)")


def command(arguments: argparse.Namespace) -> int:
    """Become the node: SIGTERM and Ctrl-C stop it cleanly, and it keeps its data for the next time."""
    try:
        if not 1 <= arguments.port <= 65535:
            raise SettingsError(f"--port {arguments.port} is not in 1 to 65535")
        node = LocalKafka(arguments.data.resolve())
        node.prepare(arguments.port)
    except TokenhaulError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    print(f"TOKENHAUL_KAFKA_BOOTSTRAP={node.bootstrap}", flush=True)
    os.execvp(node.command[0], node.command)
