"""Prompts that keep arriving: lines appended to file after file, and batches pushed over HTTP."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path


class Feeding:
    """Two threads from `start` to `stop`; `url` is ingest's, for a source called `pushed`."""

    def __init__(self, folder: Path, seed: int, url: str) -> None:
        self.folder = folder / "sources"
        self._pushed, self._url = folder / "pushed.jsonl", f"{url}/v1/prompts?source=pushed"
        self._seed = seed
        self._stop = threading.Event()
        self.failed: list[str] = []
        """Why one of them ended before."""
        self._threads = [
            threading.Thread(target=self._keep_going, args=(feed,), daemon=True) for feed in (self._append, self._push)
        ]

    @property
    def files(self) -> list[Path]:
        """What ingest was given: files, and a list of what was pushed."""
        return [*sorted(self.folder.glob("*.jsonl")), self._pushed]

    @property
    def ended(self) -> bool:
        """Nothing more comes, and the last push was answered."""
        return not any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Begin."""
        self.folder.mkdir()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Come to an end: a push that has begun is sent until it is answered."""
        self._stop.set()

    def _keep_going(self, feed: Callable[[], None]) -> None:
        try:
            feed()
        except Exception as error:  # an answer that ingest must not give
            self.failed.append(f"feeding ended: {error!r}")

    def _push(self) -> None:
        """Batches over HTTP for as long as it goes; each is sent until it is answered for good."""
        chance = random.Random(self._seed + 1)
        number = 0
        while not self._stop.wait(chance.expovariate(1.0)):
            size = chance.randint(1, 12)
            texts = [f"Push {number} to the left." for number in range(number, number + size)]
            number += size
            body = b"".join(json.dumps({"prompt": text}).encode() + b"\n" for text in texts)
            with self._pushed.open("ab") as file:
                file.write(body)
            while not _taken(self._url, body, size):
                time.sleep(0.3)

    def _append(self) -> None:
        """Lines for as long as it goes, into file after file; now and then a line comes in two halves."""
        chance = random.Random(self._seed)
        number = 0
        while not self._stop.is_set():
            with (self.folder / f"{number:07d}.jsonl").open("ab", buffering=0) as file:
                for _ in range(chance.randint(50, 400)):
                    if self._stop.wait(chance.expovariate(25.0)):
                        return
                    line = json.dumps({"prompt": f"Say {number} in other words."}).encode() + b"\n"
                    cut = chance.randrange(1, len(line)) if chance.random() < 0.05 else len(line)
                    file.write(line[:cut])
                    if cut < len(line):
                        self._stop.wait(0.7)
                        file.write(line[cut:])
                    number += 1


def _taken(url: str, body: bytes, lines: int) -> bool:
    """Whether ingest has answered that every line is published, now or before."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            results = [json.loads(line)["status"] for line in answer.read().splitlines()]
    except (OSError, http.client.HTTPException):
        return False
    assert set(results) <= {"published", "repeated"}, results
    return len(results) == lines
