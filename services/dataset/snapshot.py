"""`tokenhaul snapshot NAME`: a dataset as it is now, under a name, while the stream goes on.

    <dataset>/_snapshots/NAME.json      where each chain ended, and which exclusions there were

Shards and lists of exclusions never change, so this is enough to read the very same rows at any later time.
"""

from __future__ import annotations

import argparse
import re
import time

import msgspec

from services.dataset import cli, place
from services.dataset.place import Place
from services.kernel.errors import SettingsError
from services.sink import exclusions
from services.sink.chain import folder, shard_name, starts
from services.sink.parquet import open_shard

FOLDER = "_snapshots"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot.v1"):
    """`tails` is the offset each partition's chain ends at, by partition; `exclusions` are names of lists."""

    name: str
    dataset: str
    model: str
    partitions: int
    tails: list[int]
    exclusions: list[str]
    created_at: float


def now(place: Place, name: str = "") -> Snapshot:
    """The dataset as it is: one small read for each partition."""
    return Snapshot(
        name=name,
        dataset=place.dataset.name,
        model=place.dataset.model,
        partitions=place.dataset.partitions,
        tails=[tail(place, partition) for partition in range(place.dataset.partitions)],
        exclusions=exclusions.names(place.store, place.folder),
        created_at=time.time(),
    )


def tail(place: Place, partition: int) -> int:
    """Where the partition's chain ends."""
    found = starts(place.store.list(place.key(folder(partition))))
    if not found:
        return 0
    key = place.key(folder(partition), shard_name(found[-1]))
    with place.store.open(key) as file:
        return open_shard(file, place.store.name(key))[1].end


def create(place: Place, name: str) -> Snapshot:
    """Take a snapshot. Raises SettingsError when the name is taken or cannot be a file's."""
    if not NAME.fullmatch(name):
        raise SettingsError(f"a snapshot cannot be called {name!r}: letters, digits and . _ - make a name")
    snapshot = now(place, name)
    key = _key(place, name)
    if not place.store.create(key, msgspec.json.format(msgspec.json.encode(snapshot))):
        raise SettingsError(f"{place.store.name(key)} exists: a snapshot never changes, take another name")
    return snapshot


def load(place: Place, name: str) -> Snapshot:
    """The snapshot called `name`. Raises SettingsError when there is none, or it is of another dataset."""
    if f"{name}.json" not in place.store.list(place.key(FOLDER)):
        known = ", ".join(all_names(place)) or "none"
        raise SettingsError(f"there is no snapshot {name!r} of {place.name}; there are: {known}")
    key = _key(place, name)
    with place.store.open(key) as file:
        try:
            snapshot = msgspec.json.decode(file.read(), type=Snapshot)
        except msgspec.DecodeError as error:
            raise SettingsError(f"{place.store.name(key)} is no snapshot: {error}") from error
    if (snapshot.dataset, snapshot.partitions) != (place.dataset.name, place.dataset.partitions):
        raise SettingsError(f"{place.store.name(key)} is of another dataset: {snapshot.dataset}")
    return snapshot


def all_names(place: Place) -> list[str]:
    """The names of all snapshots."""
    return [name.removesuffix(".json") for name in place.store.list(place.key(FOLDER)) if name.endswith(".json")]


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul snapshot`."""
    parser.add_argument("name", metavar="NAME", help="what exports will call it; it cannot be taken twice")
    place.add_argument(parser)


@cli.reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Take the snapshot and say what is in it."""
    found = place.find(arguments.dataset)
    snapshot = create(found, arguments.name)
    print(
        f"{found.store.name(_key(found, snapshot.name))}: {sum(snapshot.tails)} outcomes in {snapshot.partitions} "
        f"chains, {len(snapshot.exclusions)} lists of exclusions"
    )
    return 0


def _key(place: Place, name: str) -> str:
    return place.key(FOLDER, f"{name}.json")
