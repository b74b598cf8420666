"""Bytes of strangers: whatever they are, the answer is a named error; no crash, no hang, no memory without bound.

Decoders that meet bytes from outside: messages on topics, commit metadata, answers of engines, sources files, lines and
files of sources. (Shards are fuzzed in test_damage.py, conversations in test_ingest_formats.py.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.control import Control
from schemas.cursors import Cursor
from schemas.dead import DeadLetter
from schemas.prompts import Prompt
from schemas.sequences import Outcome
from services.generator import checks, http, identity, sglang, status
from services.generator.http import Response
from services.ingest import sources
from services.ingest.lines import Mark
from services.ingest.stored import Broken, Packing, Shape, Stored
from services.kernel.codec import Decoder
from services.kernel.errors import Fatal, Reject, Retry, SettingsError
from services.kernel.settings import Secret
from services.kernel.watermark import Tracker

GOLDEN = sorted((Path(__file__).parents[2] / "schemas" / "golden").glob("*.bin"))
DEEP = 100_000
MIB = 1024 * 1024
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    )


values, json_values = nested(LEAVES | st.binary(max_size=8)), nested(LEAVES)


def changed(message: dict[str, Any], path: list[int], value: Any) -> dict[str, Any]:
    """`message` with something somewhere inside of it replaced by `value`."""
    keys = sorted(message)
    key = keys[path[0] % len(keys)]
    inner = message[key]
    new = changed(inner, path[1:], value) if isinstance(inner, dict) and inner and len(path) > 1 else value
    return {**message, key: new}


def framed(packed: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(packed)


@pytest.mark.parametrize("type_", [Prompt, Outcome, DeadLetter, Cursor, Control], ids=str)
@given(which=st.integers(0, 99), path=st.lists(st.integers(0, 99), min_size=1, max_size=4), value=values)
@settings(max_examples=150)
def test_a_message_with_anything_in_it_is_read_or_rejected(type_: Any, which: int, path: list[int], value: Any) -> None:
    message = msgspec.msgpack.decode(zstandard.decompress(GOLDEN[which % len(GOLDEN)].read_bytes()))
    with contextlib.suppress(OverflowError):  # what msgpack cannot hold cannot arrive
        data = framed(msgspec.msgpack.encode(changed(message, path, value)))
        with contextlib.suppress(Reject):
            Decoder(type_).decode(data)


@pytest.mark.parametrize("packed", [b"\x91" * DEEP, b"\x81\xa1a" * DEEP, b"\xdd" + b"\xff" * 4, b"\xdf" + b"\xff" * 4])
def test_a_message_of_lists_in_lists_or_of_four_billion_entries_is_rejected(packed: bytes) -> None:
    golden = msgspec.msgpack.encode("type") + msgspec.msgpack.encode("prompt.v1")
    for data in (packed, b"\x82" + golden + msgspec.msgpack.encode("metadata") + packed):
        with pytest.raises(Reject, match="undecodable"):
            Decoder(Prompt).decode(framed(data))


@given(text=st.text(max_size=60) | st.text("1:AQIDBAgQ/+=", max_size=60).map(lambda text: f"1:{text}"))
def test_commit_metadata_is_taken_up_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        tracker = Tracker.restore(100, text)
        assert tracker.watermark == 100
        assert tracker.high >= 100


ANSWER = {
    "output_ids": [5, 6, 2],
    "meta_info": {
        "id": "r", "finish_reason": {"type": "stop", "matched": 2}, "completion_tokens": 3, "prompt_tokens": 2,
        "num_retractions": 0, "weight_version": "default", "output_token_logprobs": None, "e2e_latency": 0.1,
    },
}  # fmt: skip
REQUEST = sglang.Request("r", [1, 4], {"max_new_tokens": 8})


def read_answer(content: bytes) -> None:
    """As the generator does; what it is made for may be raised."""
    with contextlib.suppress(Retry, Reject, Fatal):
        output = checks.check_answer(REQUEST, sglang._answer("http://engine", content), 100)
        assert output.ids
        assert all(0 <= id < 100 for id in output.ids)


@given(path=st.lists(st.integers(0, 99), min_size=1, max_size=3), value=json_values)
@settings(max_examples=300)
def test_an_answer_with_anything_in_it_is_data_or_refused(path: list[int], value: Any) -> None:
    read_answer(json.dumps(changed(ANSWER, path, value)).encode())


@given(content=st.binary(max_size=200))
def test_an_answer_of_any_bytes_is_refused(content: bytes) -> None:
    with pytest.raises((Retry, Reject)):
        sglang._answer("http://engine", content)


@pytest.mark.parametrize(
    "content",
    [b"[" * DEEP, b'{"meta_info":' * DEEP, b'{"x":' + b"[" * DEEP, b'{"output_ids":[1e999]}'],
)
def test_an_answer_of_lists_in_lists_is_refused(content: bytes) -> None:
    with pytest.raises((Retry, Reject)):
        sglang._answer("http://engine", content)


class AlwaysAnswers:
    """An Http with one answer for everything."""

    def __init__(self, response: Response) -> None:
        self._response = response

    async def get(self, url: str) -> Response:
        return self._response

    async def post(self, url: str, body: bytes) -> Response:
        return self._response


@given(
    code=st.sampled_from([200, 200, 200, 204, 301, 404, 418, 500]),
    body=json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50)
    | st.sampled_from([b"[" * DEEP, b'{"loads":' * DEEP]),
    header=st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=12),
)  # fmt: skip
@settings(max_examples=150)
def test_an_engine_that_says_anything_of_itself_is_known_or_refused(code: int, body: bytes, header: str) -> None:
    async def ask() -> None:
        engine = AlwaysAnswers(Response(code, body, {"Retry-After": header}))
        with contextlib.suppress(ValueError):
            found = await identity.read(engine, "http://engine")
            identity.refusal(found, "model", "", router_retries_off=False)
        with contextlib.suppress(ValueError):
            await status.load(engine, "http://engine")
        with contextlib.suppress(Retry, Reject, Fatal):
            await sglang.generate(engine, "http://engine", REQUEST, 5.0)

    asyncio.run(ask())


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked", b"Content-Length: 99999999999", b"X-None: no length"])
async def test_an_answer_without_end_is_cut_off(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", MIB)
    piece = b" " * 65_536
    chunk = b"10000\r\n" + piece + b"\r\n" if b"chunked" in head else piece

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
            while True:
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(pour, "127.0.0.1", 0) as server, http.HttpClient() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(http.Broken, match="answered more than 1048576 bytes"):
            await client.post(f"{url}/generate", b"{}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_takes_the_key_nowhere(status: int) -> None:
    keys: list[str | None] = []

    async def take(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.Response()

    async def send_on(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": f"{request.url.origin()}/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/elsewhere", take)
    app.router.add_route("*", "/{asked:generate|health}", send_on)
    async with TestServer(app) as server, http.HttpClient(api_key=Secret("key")) as client:
        assert (await client.post(str(server.make_url("/generate")), b"{}")).status == status
        assert (await client.get(str(server.make_url("/health")))).status == status
        with pytest.raises((Retry, Reject, Fatal), match=str(status)):
            await sglang.generate(client, str(server.make_url("")).rstrip("/"), REQUEST, 5.0)
    assert keys == []


SOURCE = {"name": "s", "files": ["*.jsonl"], "max_new_tokens": 8, "sampling": {"temperature": 1.0}, "samples": 2,
          "reasoning": {"open": "<a>", "close": [3]}, "chat_template_kwargs": {"x": 1}, "revision": 1}  # fmt: skip


def load_sources(text: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(text)
        file.flush()
        with contextlib.suppress(SettingsError):
            sources.load(file.name)


@given(path=st.lists(st.integers(0, 99), min_size=1, max_size=3), value=json_values)
@settings(max_examples=200)
def test_a_source_with_anything_in_it_is_taken_or_refused(path: list[int], value: Any) -> None:
    load_sources(json.dumps({"sources": [changed(SOURCE, path, value)]}).encode())


@given(text=st.binary(max_size=80) | st.text("{}[]&*!:-|>'\"# \nab", max_size=60).map(str.encode))
@settings(max_examples=200)
def test_a_sources_file_of_any_text_is_refused(text: bytes) -> None:
    load_sources(text)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "sources:\n- name: s\n  files: [x]\n  max_new_tokens: 1\n  chat_template_kwargs:\n"
        + "".join(f"    {line}\n" for line in LAUGHS.splitlines()),
        "sources: [{name: s, chat_template_kwargs: &k {k: *k}}]",
        "[" * 5000,
        "!!python/object/apply:os.system ['true']",
    ],
    ids=["laughs", "laughs inside", "itself inside", "deep", "object"],
)
def test_a_sources_file_that_is_a_bomb_is_refused(text: str) -> None:
    tracemalloc.start()
    try:
        load_sources(text.encode())
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def read_stored(data: bytes, shape: Shape, packing: Packing) -> None:
    stored = Stored(lambda: io.BufferedReader(io.BytesIO(data)), shape, packing)
    mark = Mark()
    with contextlib.suppress(Broken):
        while not mark.complete:
            mark = stored.read(mark, max_lines=100).mark
    stored.close()


def parquet_file() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["Hi", "you", None], "n": [[1], [], [2, 3]]}), out)
    return out.getvalue()


PARQUET = parquet_file()


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.integers(0, 40))
@settings(max_examples=300)
def test_a_damaged_parquet_source_is_read_or_named(place: float, byte: int, cut: int) -> None:
    data = bytearray(PARQUET[: len(PARQUET) - cut // 2 * (cut % 2)])
    data[int(place * len(data))] = byte
    read_stored(bytes(data), "parquet", "")


@given(
    shape=st.sampled_from(["jsonl", "json", "parquet"]), packing=st.sampled_from(["", "gz", "zst"]),
    content=st.binary(max_size=200) | json_values.map(lambda value: json.dumps([value]).encode()),
    packed=st.booleans(), cut=st.integers(0, 30),
)  # fmt: skip
@settings(max_examples=300)
def test_a_source_of_any_bytes_is_read_or_named(
    shape: Shape, packing: Packing, content: bytes, packed: bool, cut: int
) -> None:
    if packed and packing:
        content = gzip.compress(content, 1) if packing == "gz" else zstandard.compress(content)
        content = content[: len(content) - cut]
    read_stored(content, shape, packing)


def test_an_array_of_lists_in_lists_is_named() -> None:
    read_stored(b"[" * 20_000, "json", "")
    read_stored(b"[" + b"[" * 5000 + b"]" * 5000 + b"]", "json", "")


def written(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, folder / "bomb.parquet", compression="zstd", dictionary_pagesize_limit=2**30)
    assert (folder / "bomb.parquet").stat().st_size < MIB
    return folder / "bomb.parquet"


def repeated(value: str, times: int) -> Any:
    """The same text many times, held once, as it will be in the file."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([value]))


def read_apart(file: Path, mib: int) -> list[tuple[int, int, bool]]:
    """(row, bytes, too long) of what a process of its own reads, which may take `mib` more than it has at first."""
    code = f"""
import resource, sys
from pathlib import Path
from services.ingest.lines import Mark
from services.ingest.places import file_input
import pyarrow.parquet
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {mib} * 2**20,) * 2)
stored, mark = file_input(Path(sys.argv[1])), Mark()
while not mark.complete:
    taken = stored.read(mark, max_lines=100, take_rest=True)
    mark = taken.mark
    for line in taken.lines:
        print(line.row, len(line.data), int(line.too_long))
"""
    environ = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, env=environ, timeout=100
    )
    if done.returncode:
        raise Broken(done.stderr.strip().splitlines()[-1])
    return [
        (int(row), int(size), long == "1") for row, size, long in (line.split() for line in done.stdout.splitlines())
    ]


def test_a_small_parquet_file_of_long_texts_is_refused_row_by_row(tmp_path: Path) -> None:
    file = written(pa.table({"prompt": repeated("x" * 100 * 10**6, 20)}), tmp_path)
    assert read_apart(file, 1200) == [(row, 0, True) for row in range(1, 21)]


def test_a_row_of_a_parquet_file_with_a_text_again_and_again_is_refused_alone(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 3001, 3002], pa.int32())
    turns = pa.StructArray.from_arrays([repeated("x" * MIB, 3002)], ["content"])
    file = written(pa.table({"messages": pa.ListArray.from_arrays(offsets, turns)}), tmp_path)
    assert [(row, long) for row, _, long in read_apart(file, 1200)] == [(1, False), (2, True), (3, False)]


def test_rows_of_a_parquet_file_that_are_long_but_not_too_long_are_made_few_at_a_time(tmp_path: Path) -> None:
    file = written(pa.table({"prompt": repeated("x" * 15 * MIB, 200)}), tmp_path)
    assert read_apart(file, 1200) == [(row, 15 * MIB + len('{"prompt":""}'), False) for row in range(1, 201)]


def test_a_row_group_that_is_a_bomb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.ingest.tables._GROUP_BYTES", 8 * MIB)
    file = written(pa.table({"prompt": repeated("x" * 12 * MIB, 1)}), tmp_path)
    with pytest.raises(Broken, match=r"row group 0 is a bomb: a file of \d+ bytes has 1258\d{4} in it"):
        Stored(lambda: io.BufferedReader(io.BytesIO(file.read_bytes())), "parquet", "").read(Mark(), max_lines=1)


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_packed_parquet_file_that_is_a_bomb_does_not_fill_the_disk(
    packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.ingest.stored._UNPACKED_BYTES", 8 * MIB)
    data = bytes(16 * MIB)
    bomb = gzip.compress(data) if packing == "gz" else zstandard.compress(data)
    stored = Stored(lambda: io.BufferedReader(io.BytesIO(bomb)), "parquet", packing)
    with pytest.raises(Broken, match=f"it is a bomb: {len(bomb)} bytes of it stand for more than {8 * MIB}"):
        stored.read(Mark(), max_lines=1)


@pytest.mark.parametrize("packing", ["gz", "zst"])
@pytest.mark.parametrize("shape", ["jsonl", "json"])
def test_a_bomb_is_unpacked_a_piece_at_a_time(shape: Shape, packing: Packing) -> None:
    line = b'{"prompt":"' + b" " * 32 * MIB + b'"}\n'
    bomb = gzip.compress(line * 2, 1) if packing == "gz" else zstandard.compress(line * 8)
    tracemalloc.start()
    try:
        read_stored(bomb, shape, packing)
        assert tracemalloc.get_traced_memory()[1] < 128 * MIB
    finally:
        tracemalloc.stop()
