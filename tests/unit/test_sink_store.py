"""A store creates a key once, durably, whoever else tries."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from services.kernel.errors import Fatal, Retry
from services.kernel.objects import open_store
from services.kernel.store import Data, LocalStore, Store, prove
from services.sink.chain import claim
from tests.support.outcomes import DATASET, MemoryStore


@pytest.fixture(params=["files", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return open_store(
        str(tmp_path / "root") if request.param == "files" else request.getfixturevalue("s3").fresh_root()
    )


def content(store: Store, key: str) -> bytes:
    with store.open(key) as file:
        return file.read()


def test_the_first_wins(store: Store) -> None:
    assert store.create("d/p/a", b"first")
    assert not store.create("d/p/a", b"second")
    assert content(store, "d/p/a") == b"first"
    assert store.list("d/p") == ["a"]
    assert store.list("d/q") == []
    prove(store)


def test_of_many_at_once_one_wins(store: Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda n: store.create("d/p/a", str(n).encode()), range(32)))
    assert sum(won) == 1
    assert content(store, "d/p/a") == str(won.index(True)).encode()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("d/a", b"1")
    store.create("d/a", b"2")
    prove(store)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_a_store_that_overwrites_is_refused(tmp_path: Path) -> None:
    class Overwriting(LocalStore):
        def create(self, key: str, data: Data) -> bool:
            super().create(key, data)
            return True

    with pytest.raises(Fatal, match="lets the same file be created twice"):
        prove(Overwriting(tmp_path))


def test_a_link_that_worked_is_believed_over_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lost_answer(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # the client of NFS sends it again and hears that it is taken

    monkeypatch.setattr(os, "link", lost_answer)
    assert LocalStore(tmp_path).create("a", b"1")


def test_what_the_file_system_refuses_may_pass_later(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("a file where a directory must be")
    store = LocalStore(tmp_path)
    with pytest.raises(Retry, match=r"/d/a: File exists"):
        store.create("d/a", b"1")
    with pytest.raises(Retry, match=r"/d/a: Not a directory"):
        store.open("d/a")
    (tmp_path / "d").unlink()
    assert store.create("d/a", b"1")


def test_only_what_crashed_long_ago_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("d/a", b"1")
    old, new = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "new"
    old.touch()
    new.touch()
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    os.utime(tmp_path / "d" / "a", (yesterday, yesterday))
    store.sweep()
    assert not old.exists()
    assert new.exists()
    assert content(store, "d/a") == b"1"


def test_a_dataset_is_claimed_once_and_by_itself_again(store: Store) -> None:
    claim(store, DATASET)
    claim(store, msgspec.structs.replace(DATASET, created_at=2.0))
    described = msgspec.json.decode(content(store, "test/_dataset.json"))
    assert {key: described[key] for key in ("name", "model", "partitions", "created_at")} == {
        "name": "test", "model": "fake", "partitions": 3, "created_at": 1.0
    }  # fmt: skip


@pytest.mark.parametrize("other", [{"model": "other"}, {"partitions": 4}])
def test_another_dataset_is_kept_out(store: Store, other: dict[str, object]) -> None:
    claim(store, DATASET)
    field = next(iter(other))
    with pytest.raises(Fatal, match=rf"_dataset\.json says {field} "):
        claim(store, msgspec.structs.replace(DATASET, **other))


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "_dataset"])
def test_a_name_that_is_no_directory_is_refused(store: Store, name: str) -> None:
    with pytest.raises(Fatal, match="cannot be a directory"):
        claim(store, msgspec.structs.replace(DATASET, name=name))


def test_a_description_that_cannot_be_read_is_named(store: Store) -> None:
    store.create("test/_dataset.json", b"{")
    with pytest.raises(Fatal, match=r"_dataset\.json does not describe a dataset"):
        claim(store, DATASET)
