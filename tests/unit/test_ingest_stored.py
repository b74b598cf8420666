"""Compressed lines, JSON arrays and Parquet are read row by row, from any row on, and only when they are whole."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from services.ingest.lines import Mark
from services.ingest.places import Input, find
from services.ingest.stored import Broken

RECORDS = [{"prompt": f"number {number} ä", "nested": {"list": [number, 1.5, None, True]}} for number in range(2000)]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]),  # two members
    ".zst": lambda data: zstandard.compress(data[:999]) + zstandard.ZstdCompressor().compressobj().flush()
    + zstandard.ZstdCompressor(write_content_size=False).compress(data[999:]),  # three frames
}  # fmt: skip
NAMES = [f"s.{shape}{packing}" for shape in ("jsonl", "json", "parquet") for packing in PACK]


def content(name: str, records: list[Any]) -> bytes:
    shape, packing = name.split(".")[1], "." + name.split(".")[2] if name.count(".") == 2 else ""
    if shape == "parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=700)
        data = sink.getvalue().to_pybytes()
    elif shape == "json":
        data = json.dumps(records, indent=1).encode()
    else:
        data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    return PACK[packing](data)


def test_keys_that_only_other_rows_of_a_parquet_file_have_are_not_there(tmp_path: Path) -> None:
    tools = [{"name": "f", "parameters": {"x": {"type": "int"}}}, {"name": "g", "parameters": {"y": {"enum": [None]}}}]
    records = [{"prompt": "p", "tools": [tool], "more": None} for tool in tools] + [{"prompt": "p", "tools": []}]
    (tmp_path / "s.parquet").write_bytes(content("s.parquet", records))
    found, _ = read(opened(tmp_path / "s.parquet"), Mark(), 10)
    assert [record["tools"] for record in found] == [[tools[0]], [tools[1]], []], "a template prints them"


_opened: list[Input] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def opened(file: Path) -> Input:
    (entry,) = find([file.name], file.parent, []).entries.values()
    _opened.append(entry.make())
    return _opened[-1]


def read(source: Input, mark: Mark, at_once: int) -> tuple[list[Any], Mark]:
    records = []
    while True:
        taken = source.read(mark, max_lines=at_once, take_rest=True)
        records += [json.loads(line.data) for line in taken.lines]
        if taken.mark == mark:
            return records, mark
        mark = taken.mark


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_gives_its_records_in_order_and_knows_its_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(content(name, RECORDS))
    source = opened(tmp_path / name)
    records, mark = read(source, Mark(), 300)
    assert records == RECORDS
    assert (mark.row, mark.complete, mark.offset) == (2000, True, (tmp_path / name).stat().st_size)
    assert source.rows == (2000 if "parquet" in name else None)
    assert opened(tmp_path / name).is_same(mark)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_restart_reading_goes_on_behind_the_row_it_had(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(content(name, RECORDS))
    first = opened(tmp_path / name).read(Mark(), max_lines=901)
    again = opened(tmp_path / name).read(first.mark, max_lines=5)
    assert [json.loads(line.data) for line in again.lines] == RECORDS[901:906]
    assert [line.row for line in again.lines] == [902, 903, 904, 905, 906]
    assert not again.replaced


@pytest.mark.parametrize("name", NAMES[1:])
def test_another_content_is_read_from_its_start(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(content(name, RECORDS))
    _, mark = read(opened(file), Mark(), 500)
    file.write_bytes(content(name, RECORDS[5:]))
    assert not opened(file).is_same(mark)
    taken = opened(file).read(mark, max_lines=2)
    assert taken.replaced
    assert [json.loads(line.data) for line in taken.lines] == RECORDS[5:7]


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_file_that_was_cut_off_is_not_called_read(tmp_path: Path, name: str) -> None:
    """Whatever was whole is taken, the rest is waited for."""
    data = content(name, RECORDS)
    (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(Broken):
        read(opened(tmp_path / name), Mark(), 300)


@pytest.mark.parametrize("text", ["", "[1, 2", '"text"', "3"])
def test_a_json_file_that_is_no_array_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(Broken):
        read(opened(tmp_path / "s.json"), Mark(), 300)


def test_lines_in_a_json_file_are_read_as_lines(tmp_path: Path) -> None:
    """As many datasets have them."""
    (tmp_path / "s.json").write_text('{"prompt": "a"}\n\n{"prompt": "b"}')
    assert read(opened(tmp_path / "s.json"), Mark(), 1)[0] == [{"prompt": "a"}, {"prompt": "b"}]


def test_what_json_has_not_becomes_text_or_a_number(tmp_path: Path) -> None:
    record = {
        "day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "raw": b"\x00\x01", "map": {"a": [1, 2]},
        "none": None,
    }  # fmt: skip
    (tmp_path / "s.parquet").write_bytes(content("s.parquet", [record]))
    ((found,), _) = read(opened(tmp_path / "s.parquet"), Mark(), 1)
    assert found == {"day": "2026-01-02", "price": 1.5, "raw": "AAE=", "map": {"a": [1, 2]}, "none": None}
