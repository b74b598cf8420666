"""SIGTERM and SIGINT: the first asks the service to end well, the second ends the process at once.

asyncio's own handlers are used, so that a signal wakes the loop. After the first signal the default handlers are
back, which is what makes the second one final.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_stop(callback: Callable[[str], None]) -> Iterator[None]:
    """While inside, call `callback` with the signal's name at the first SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def handle(number: signal.Signals) -> None:
        restore()
        callback(number.name)

    for number in _SIGNALS:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        restore()
