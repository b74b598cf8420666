"""Objects of a real S3 server are found, read row by row, known again, and never mixed with what replaces them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from services.ingest import buckets
from services.ingest.lines import MAX_BATCH_BYTES, Mark
from services.ingest.places import Found, check, find
from services.ingest.reader import Reader
from services.ingest.sources import Source, Sources
from services.kernel import objects
from services.kernel.errors import Retry
from services.kernel.objects import ObjectStore
from tests.support.s3 import S3Server

RECORDS = [{"prompt": f"number {number}"} for number in range(50)]
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)


class Bucket:
    """A folder of the bucket of this test's own."""

    def __init__(self, s3: S3Server) -> None:
        self.url = s3.fresh_root()
        self.client = S3Store.from_url(self.url, client_options={"allow_http": True})

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self.client, key, data)

    def find(self, *patterns: str) -> Found:
        return find([f"{self.url}{pattern}" for pattern in patterns], Path("/"), [])

    def names(self, *patterns: str) -> list[str]:
        return [name.removeprefix(self.url) for name in self.find(*patterns).entries]


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return Bucket(s3)


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(RECORDS), sink, row_group_size=20)
    return bytes(sink.getvalue().to_pybytes())


def test_folders_objects_and_patterns_are_found(bucket: Bucket) -> None:
    for key in ("in/a.jsonl", "in/deep/b.jsonl.gz", "in/deep/c.txt", "in/.hidden/d.jsonl", "into/e.json", "f.jsonl"):
        bucket.put(key, b"{}\n")
    assert bucket.names("/in") == ["/in/a.jsonl", "/in/deep/b.jsonl.gz"]
    assert bucket.names("/in/", "/in/a.jsonl") == ["/in/a.jsonl", "/in/deep/b.jsonl.gz"]
    assert bucket.names("/in/a.jsonl") == ["/in/a.jsonl"]
    assert bucket.names("/*.jsonl") == ["/f.jsonl"]
    assert bucket.names("/in*/*.json*") == ["/in/a.jsonl", "/into/e.json"]
    assert bucket.names("/**/*.jsonl") == ["/f.jsonl", "/in/a.jsonl"]
    assert bucket.names("/nothing") == []
    assert list(bucket.find("/in").passed_over) == [f"{bucket.url}/in/deep/c.txt"]


def test_a_folder_with_nothing_in_it_yet_does_not_have_its_bucket_listed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("other/a.jsonl", LINES)
    walk, listed = ObjectStore.walk, list[str]()

    def noted(store: ObjectStore, folder: str) -> Iterator[objects.Found]:
        for found in walk(store, folder):
            listed.append(found.key)
            yield found

    monkeypatch.setattr(ObjectStore, "walk", noted)
    assert bucket.names("/in", "/in/", "/in/*.jsonl", "/in/a.jsonl") == []
    assert not listed, "it is looked at every few seconds, and a bucket may hold millions"
    bucket.put("in/a.jsonl", LINES)
    bucket.put("in/b.jsonl", LINES)
    assert bucket.names("/in/a.jsonl") == ["/in/a.jsonl"]
    assert not listed


@pytest.mark.parametrize(
    ("key", "data"), [("a.jsonl", LINES), ("a.jsonl.gz", gzip.compress(LINES)), ("a.parquet", parquet())]
)
def test_objects_are_read_in_batches_and_read_on_after_a_restart(bucket: Bucket, key: str, data: bytes) -> None:
    bucket.put(key, data)
    taken: list[Any] = []
    mark = Mark()
    while not mark.complete:
        (entry,) = bucket.find("").entries.values()
        source = entry.make()  # each time as after a restart
        read = source.read(mark, max_lines=7)
        source.close()
        assert not read.replaced
        taken += [json.loads(line.data) for line in read.lines]
        mark = read.mark
    assert taken == RECORDS


def test_an_object_that_has_grown_is_read_on_and_another_one_from_its_start(bucket: Bucket) -> None:
    bucket.put("a.jsonl", LINES.rstrip(b"\n"))  # an object is whole: its last line waits for nothing
    reader = Reader(
        Sources(Path("/"), [Source(name="a", files=[bucket.url], max_new_tokens=1)]), {},
        batch_records=100, scan_seconds=10, take_rest=False,
    )  # fmt: skip
    batches = list(iter(reader.next, None))
    assert [len(batch.lines) for batch in batches] == [50]
    bucket.put("a.jsonl", LINES + b'{"prompt": "more"}\n')
    (more,) = list(iter(reader.next, None))
    assert [line.data for line in more.lines] == [b'{"prompt": "more"}']
    bucket.put("a.jsonl", LINES[20:])
    assert sum(len(batch.lines) for batch in iter(reader.next, None)) == 49 + 1


def test_an_object_replaced_while_it_is_read_is_not_mixed_with_the_new_one(bucket: Bucket) -> None:
    line = b'{"prompt": "' + b"x" * 1_000_000 + b'"}\n'
    bucket.put("a.jsonl", line * (2 * MAX_BATCH_BYTES // len(line)))
    (entry,) = bucket.find("").entries.values()
    source = entry.make()
    first = source.read(Mark(), max_lines=1000)
    bucket.put("a.jsonl", b"{}\n" * 100)
    with pytest.raises(OSError, match=r"a\.jsonl was replaced while it was read"):
        source.read(first.mark, max_lines=1000)
    source.close()
    (entry,) = bucket.find("").entries.values()
    again = entry.make()
    assert again.read(first.mark, max_lines=1000).replaced
    again.close()


def test_a_store_that_is_away_holds_up_its_source_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_REGION": "r", "AWS_ACCESS_KEY_ID": "k"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setattr("services.kernel.objects._RETRIES", {"max_retries": 0})
    monkeypatch.setattr(buckets, "_store", buckets._store.__wrapped__)
    (tmp_path / "b.jsonl").write_bytes(LINES)
    sources = [
        Source(name="a", files=["s3://away/prompts"], max_new_tokens=1),
        Source(name="b", files=["b.jsonl"], max_new_tokens=1),
    ]
    how: dict[str, Any] = {"batch_records": 100, "scan_seconds": 10}
    batch = Reader(Sources(tmp_path, sources), {}, take_rest=False, **how).next()
    assert batch is not None
    assert batch.source.name == "b"
    assert "source a: store: s3://away" in caplog.text
    with pytest.raises(Retry):
        Reader(Sources(tmp_path, sources), {}, take_rest=True, **how).next()


@pytest.mark.parametrize("pattern", ["s3://", "ftp://host/x", "s3:///key", "http://host/a.jsonl"])
def test_what_is_no_store_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"is no s3://bucket/prefix"):
        check([pattern], Path("/"), [])


def test_objects_stay_in_the_roots_too() -> None:
    roots = ["/data", "s3://bucket/prompts"]
    for pattern in ("s3://bucket/prompts", "s3://bucket/prompts/", "s3://bucket/prompts/a/*.jsonl"):
        check([pattern], Path("/"), roots)
    for pattern in ("s3://bucket/prompts-of-others", "s3://bucket/*", "s3://other/prompts/a.jsonl"):
        with pytest.raises(ValueError, match="leaves TOKENHAUL_INGEST_ROOTS"):
            check([pattern], Path("/"), roots)
