"""What a run has left behind, read without any code of the services: topics, shards, the engines' logs, the journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.chaos.facts import Event, Evidence, Generation, Shard
from tests.chaos.wire import read_topics


def read(bootstrap: list[str], prefix: str, dataset: Path, engines: Iterable[Path], sources: Iterable[Path],
         journal: Path) -> Evidence:  # fmt: skip
    """Everything, once the run is over."""
    prompts, commits, rebalances = asyncio.run(read_topics(bootstrap, prefix))
    shards, damaged = read_shards(dataset)
    generations, torn = read_generations(engines)
    return Evidence(
        lines=[json.loads(line)["prompt"] for path in sources for line in path.read_bytes().splitlines()],
        prompts=prompts,
        shards=shards,
        damaged=damaged,
        generations=generations,
        torn=torn,
        commits=commits,
        events=sorted([*read_journal(journal), *rebalances], key=lambda event: event.at),
    )


def read_shards(dataset: Path) -> tuple[list[Shard], list[str]]:
    """(shards in order of their chains, what cannot be read)."""
    shards, damaged = [], []
    for path in sorted(dataset.glob("partition=*/*")):
        name = str(path.relative_to(dataset))
        try:
            file = pq.ParquetFile(path)
            footer = json.loads((file.metadata.metadata or {})[b"tokenhaul"])
            rows = file.read(columns=["id", "input_ids", "prompt_length", "rids", "kafka_offset"]).to_pylist()
            shards.append(
                Shard(
                    name, footer["partition"], footer["start"], footer["end"], rows,
                    [(id, reason) for id, reason in footer["failures"]], footer["superseded"],
                )
            )  # fmt: skip
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            damaged.append(f"{name}: {error!r}")
    return shards, damaged


def read_generations(logs: Iterable[Path]) -> tuple[list[Generation], int]:
    """(of all engines, in order of their starts; lines that cannot be read: a kill may cut one short)."""
    found: list[Generation] = []
    torn = 0
    for log in logs:
        running: dict[str, int] = {}
        for line in filter(None, log.read_bytes().splitlines() if log.exists() else []):
            try:
                entry = json.loads(line)
            except ValueError:
                torn += 1
                continue
            if entry["type"] == "Started":
                running[entry["rid"]] = len(found)
                found.append(
                    Generation(
                        rid=entry["rid"], input_ids=tuple(entry["input_ids"]), output_ids=(), started=entry["at"],
                        ended=None, fault=entry["fault"], aborted=True,
                    )
                )  # fmt: skip
            elif (index := running.pop(entry["rid"], None)) is not None:
                reason = (entry.get("finish_reason") or {}).get("type")
                found[index] = found[index]._replace(
                    output_ids=tuple(entry["output_ids"]), ended=entry["at"], aborted=reason not in ("stop", "length")
                )
    return sorted(found, key=lambda generation: generation.started), torn


def read_journal(path: Path) -> list[Event]:
    """What the run noted down of its own doings."""
    return [Event(*json.loads(line)) for line in path.read_text().splitlines()]
