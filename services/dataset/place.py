"""Where a dataset is: the argument all dataset tools share, and what stands there."""

from __future__ import annotations

import argparse
import os

import msgspec

from schemas.control import Dataset
from services.kernel.errors import Fatal, SettingsError
from services.kernel.objects import open_store
from services.kernel.store import Store
from services.sink import chain


class Place(msgspec.Struct, frozen=True):
    """A dataset in a store, under the key `folder` ("" when it is all there is)."""

    store: Store
    folder: str
    dataset: Dataset

    def key(self, *parts: str) -> str:
        """The key of something that belongs to the dataset."""
        return chain.join(self.folder, "/".join(parts))

    @property
    def name(self) -> str:
        """The full name, for people."""
        return self.store.name(self.folder)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """`--dataset`, which all tools share."""
    parser.add_argument(
        "--dataset", metavar="PLACE", default=os.environ.get("TOKENHAUL_SINK_ROOT", ""),
        help="the dataset, or where it is the only one: a directory or s3://bucket/prefix "
        "(default: TOKENHAUL_SINK_ROOT)",
    )  # fmt: skip


def find(place: str) -> Place:
    """The dataset at `place`, or right under it. Raises SettingsError when there is none, or more than one."""
    if not place:
        raise SettingsError("--dataset PLACE is required, or TOKENHAUL_SINK_ROOT must be set")
    store = open_store(place)
    try:
        return Place(store, *chain.find(store))
    except Fatal as error:
        raise SettingsError(str(error)) from error


def check(place: Place, frozen: Dataset, prefix: str) -> None:
    """Raises SettingsError when the topics `prefix`.* were made for another dataset, which `frozen` is."""
    here = place.dataset
    if (frozen.name, frozen.model, frozen.partitions) != (here.name, here.model, here.partitions):
        raise SettingsError(
            f"{place.name} is dataset {here.name!r}, the topics {prefix}.* belong to {frozen.name!r}: set "
            "TOKENHAUL_KAFKA_PREFIX"
        )
