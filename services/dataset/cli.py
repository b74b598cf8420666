"""What the commands of the dataset tools share."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from aiokafka.errors import KafkaError

from services.kernel.errors import TokenhaulError

Command = Callable[[argparse.Namespace], int]


def reports_errors(command: Command) -> Command:
    """Errors raised on purpose become lines for people and an exit status."""

    @functools.wraps(command)
    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except TokenhaulError as error:
            print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
            return error.status
        except KafkaError as error:  # one that will not pass: we may not do this, most likely
            print(f"tokenhaul: Kafka: {error!r}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("tokenhaul: interrupted", file=sys.stderr)
            return 130

    return run


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def share(text: str) -> float:
    """An argument between 0 and 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{number} is not between 0 and 1")
    return number
