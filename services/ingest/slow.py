"""Tokenizers written in Python, which come with models as code of their own (Kimi's): many processes make up for it.

An `encode(text)` of their own is called without any keyword: Kimi's takes another way as soon as there is one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from services.ingest import tokenizer_files
from services.kernel.errors import TokenhaulError

_CHUNK = 16
_own: Any = None  # of a worker process: its tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text in which the template has written all special tokens."""
    if type(tokenizer).encode.__module__.startswith("transformers."):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(text))


class SlowEncoder:
    """Encodes in processes that each hold the tokenizer; they start with the first texts. Threads may share it."""

    def __init__(self, directory: Path, processes: int) -> None:
        """`processes`: 0 for one a core."""
        self._directory, self._processes = directory, processes or os.cpu_count() or 1
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `texts`, in their order. Raises TokenhaulError when a process died."""
        try:
            return list(self._started().map(_encode, texts, chunksize=_CHUNK))
        except BrokenProcessPool as error:
            raise TokenhaulError("a process that tokenizes died (out of memory?): start ingest again") from error

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            if self._pool:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._pool is None:
                # Not forked: threads of ours may hold locks that the copy would wait for.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self._processes, context, _load, (str(self._directory),))
            return self._pool


def _load(directory: str) -> None:
    global _own
    for number in (signal.SIGINT, signal.SIGTERM):
        # A terminal sends them to all of us; what is at hand is finished, and our parent ends us when it is done.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _own = tokenizer_files.load(Path(directory), trust_remote_code=True)


def _end_with_parent() -> None:
    # A parent that is killed cannot end us, and the pipe we wait at is open at our own end, too.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(text: str) -> list[int]:
    return encode(_own, text)
