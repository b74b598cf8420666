"""Datasets of the Hub, found in a local cache as a download leaves it there, are read row by row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet

from services.ingest import hub
from services.ingest.lines import Mark
from services.ingest.places import check, find
from services.kernel.errors import Fatal, Retry

RECORDS = [{"messages": [{"role": "user", "content": f"number {number}"}]} for number in range(600)]


def cached(cache: Path, records: Sequence[Mapping[str, Any]], hash: str) -> None:
    """Put a dataset owner/name of these records into the cache."""
    file = cache / "download.parquet"
    cache.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), file)
    builder = Parquet(
        cache_dir=str(cache), dataset_name="owner___name", config_name="default", hash=hash,
        data_files={"train": [str(file)], "test": [str(file)]},
    )  # fmt: skip
    builder.download_and_prepare()
    made = Path(builder.cache_dir)
    there = cache / "owner___name" / "default" / "0.0.0" / hash
    there.parent.mkdir(parents=True, exist_ok=True)
    made.rename(there)
    for arrow in there.glob("*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("owner___", "")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub._load.cache_clear()
    cached(tmp_path / "cache", RECORDS, "0123")
    yield tmp_path / "cache"
    hub._load.cache_clear()


def test_all_splits_are_found_and_read_in_batches(cache: Path) -> None:
    entries = find(["hf://owner/name"], Path("/"), []).entries
    assert list(entries) == ["hf://owner/name?split=train", "hf://owner/name?split=test"]
    taken, mark = [], Mark()
    while not mark.complete:
        read = entries["hf://owner/name?split=train"].make().read(mark, max_lines=350)
        taken += [json.loads(line.data) for line in read.lines]
        mark = read.mark
    assert taken == RECORDS
    assert (mark.row, mark.offset) == (600, entries["hf://owner/name?split=train"].size)
    (one,) = find(["hf://owner/name?split=test&config=default"], Path("/"), []).entries.values()
    assert one.make().rows == 600
    assert one.make().is_same(mark) == (one.version == entries["hf://owner/name?split=train"].version)


def test_another_revision_of_a_dataset_is_read_from_its_start(cache: Path) -> None:
    (first,) = find(["hf://owner/name?split=train"], Path("/"), []).entries.values()
    mark = first.make().read(Mark(), max_lines=10).mark
    hub._load.cache_clear()
    (same,) = find(["hf://owner/name?split=train"], Path("/"), []).entries.values()
    assert not same.make().read(mark, max_lines=10).replaced
    hub._load.cache_clear()
    cached(cache, RECORDS[5:], "4567")
    (other,) = find(["hf://owner/name?split=train"], Path("/"), []).entries.values()
    read = other.make().read(mark, max_lines=10)
    assert read.replaced
    assert json.loads(read.lines[0].data) == RECORDS[5]


def test_what_is_wrong_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Fatal, match=r"hf://owner/name cannot be loaded: ValueError: Unknown split"):
        find(["hf://owner/name?split=dev"], Path("/"), [])
    with pytest.raises(Retry, match=r"hf://owner/none: Couldn't reach"):
        find(["hf://owner/none"], Path("/"), [])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Fatal, match=r"pip install 'tokenhaul\[hf\]'"):
        find(["hf://owner/name?split=train"], Path("/"), [])


def test_a_pattern_names_a_dataset_within_the_roots() -> None:
    check(["hf://owner/name?config=a&split=train&revision=main"], Path("/"), ["hf://owner/"])
    for pattern in ("hf://name", "hf://owner/name/data.parquet", "hf://owner/name?splits=train"):
        with pytest.raises(ValueError, match="is no hf://owner/name"):
            check([pattern], Path("/"), [])
    with pytest.raises(ValueError, match="leaves TOKENHAUL_INGEST_ROOTS"):
        check(["hf://owner/name"], Path("/"), ["hf://other/", "/data"])
