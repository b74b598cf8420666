"""What services say of themselves on /metrics, as far as `tokenhaul status` shows it."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
_SECONDS = 5.0


class Scraped(msgspec.Struct):
    """Samples of all endpoints together: {name: {labels: [one value for each endpoint that has it]}}."""

    samples: dict[str, dict[Labels, list[float]]]
    unreachable: dict[str, str]
    """{address: why}"""

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums over everything but `label`."""
        sums: dict[str, float] = defaultdict(float)
        for labels, values in self.samples.get(name, {}).items():
            sums[dict(labels).get(label, "")] += sum(values)
        return dict(sums)

    def highest(self, name: str, label: str) -> dict[str, float]:
        """The highest of what was told about each value of `label`: for what several see of the same thing."""
        most: dict[str, float] = {}
        for labels, values in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            most[key] = max([*values, most.get(key, values[0])])
        return most


async def scrape(addresses: Sequence[str]) -> Scraped:
    """Ask every address behind each host:port of `addresses` (a name in DNS may stand for many)."""
    scraped = Scraped({}, {})
    resolved = await asyncio.gather(*map(_resolve, addresses))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS), raise_for_status=True) as http:

        async def ask(address: str) -> None:
            try:
                async with http.get(f"http://{address}/metrics") as answer:
                    found = list(_samples(await answer.text()))
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                scraped.unreachable[address] = str(error) or type(error).__name__
                return
            for name, labels, value in found:
                scraped.samples.setdefault(name, {}).setdefault(labels, []).append(value)

        await asyncio.gather(*(ask(address) for found in resolved for address in found))
    return scraped


def _samples(text: str) -> Iterator[tuple[str, Labels, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("tokenhaul_"):
                yield sample.name, tuple(sorted(sample.labels.items())), sample.value


async def _resolve(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, family=socket.AF_INET
        )
    except (OSError, ValueError):
        return [address]  # asking it will say what is wrong
    return sorted({f"{place[4][0]}:{port}" for place in found})
