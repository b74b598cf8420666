"""What the generator is measured beside, each a process of its own that prints CPU seconds a row and rows a second.

aiohttp  a bare loop of 512 in flight: no queue, no checks, nothing kept. The floor.
openai   a client per row in a pool of 64 threads: what the field's best-known script does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import aiohttp

ROWS = {"aiohttp": 10_000, "openai": 300}
BODY = {
    "rid": "0" * 45,
    "input_ids": list(range(100, 400)),
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 512, "stop_token_ids": [2], "sampling_seed": 1},
}


def with_aiohttp(url: str, rows: int) -> None:
    """POST and decode."""

    async def run() -> None:
        left = iter(range(rows))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def worker() -> None:
                for _ in left:
                    async with session.post(f"{url}/generate", json=BODY) as answer:
                        json.loads(await answer.read())

            await asyncio.gather(*(worker() for _ in range(512)))

    asyncio.run(run())


def with_openai(url: str, rows: int) -> None:
    """The OpenAI client decodes into its own models; the engine's answer is near enough to one for that."""
    from openai import OpenAI

    def row(_: int) -> None:
        client = OpenAI(base_url=url, api_key="none", max_retries=0)
        client.post("/generate", body=BODY, cast_to=object)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(row, range(rows)))


if __name__ == "__main__":
    name, url = sys.argv[1:]
    clients: dict[str, Callable[[str, int], None]] = {"aiohttp": with_aiohttp, "openai": with_openai}
    clients[name](url, 100)  # warm
    wall, cpu = time.monotonic(), time.process_time()
    clients[name](url, ROWS[name])
    print((time.process_time() - cpu) / ROWS[name], ROWS[name] / (time.monotonic() - wall))
