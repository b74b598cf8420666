"""Failures that are none any more: a row of the same record came later, with no replay (of another generator)."""

from __future__ import annotations

from collections.abc import Collection

from schemas import ids
from schemas.control import Dataset
from services.dataset import place
from services.dataset.reader import View
from services.kernel.kafka import Kafka


def among(letters: Collection[bytes], root: str, frozen: Dataset, kafka: Kafka) -> set[bytes]:
    """Which of these keys of letters are ids of rows in the dataset at `root`, as far as it is committed.

    The sink's shards list every row that came after a failure, so the footers of the partitions concerned are all that
    is read. Raises SettingsError when there is no dataset or another one than `frozen`, Fatal and Retry as View does.
    """
    dataset = place.find(root)
    place.check(dataset, frozen, kafka.settings.prefix)
    homes = {ids.partition(key, frozen.partitions) for key in letters if len(key) == ids.ID_BYTES}
    if not homes:
        return set()
    view = View(dataset)
    shards = [shard for shard in view.shards if shard.partition in homes]
    superseded = (bytes.fromhex(id) for _, footer in view.footers(shards) for id in footer.superseded)
    return {id for id in superseded if id in letters}
