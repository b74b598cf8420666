"""What POST /v1/prompts refuses before anything is published, and how a body is split into records."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.ingest import http as api
from services.ingest.http import PromptsApi, served
from services.ingest.intake import FILE, Intake, Part
from services.ingest.lines import MAX_LINE_BYTES, Mark
from services.ingest.prompts import Letter, Made, Ready
from services.ingest.reader import Batch
from services.ingest.settings import IngestSettings, check
from services.ingest.sources import Sample, Source
from services.kernel.errors import Fatal, SettingsError, TokenhaulError
from services.kernel.settings import Secret
from services.local.kafka import free_ports
from tests.support.ingest import SMOLLM2


def settings(**given: object) -> IngestSettings:
    return msgspec.structs.replace(
        IngestSettings(sources_file="", tokenizer=str(SMOLLM2), batch_records=4, http_max_body_bytes=1024), **given
    )


def source(**keys: object) -> Source:
    return Source(name="web", http=True, max_new_tokens=1, **keys)  # type: ignore[arg-type]


def make(batch: Batch) -> Made:
    """Whole numbers are prompts, anything else is refused."""
    made = Made([], [], Counter())
    for line in batch.lines:
        if line.data.isdigit() and not line.too_long:
            made.prompts.append(Ready(int(line.data[-9:]).to_bytes(16, "big"), line.data, 1, line.row))
        else:
            made.letters.append(Letter(b"", b"", line.row, "too_long" if line.too_long else "no_number", "why"))
    return made


class Desk:
    """The API with what stands behind it: everything that waits is published, in transactions of whatever is there."""

    def __init__(self, given: IngestSettings, *sources: Source) -> None:
        self.failures: list[BaseException] = []
        self.intake = Intake(make, self.failures.append)
        self.intake.open(sources or [source()], {})
        self.full = False
        self.transactions: list[list[Part]] = []
        app = PromptsApi(given, self.intake, lambda: self.full).app
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingest")

    async def publish(self) -> None:
        while True:
            await self.intake.arrived.wait()
            parts = self.intake.take(1000)
            self.transactions.append(parts)
            for part in parts:
                assert part.published is not None
                part.published.set_result(frozenset(ready.id for ready in part.made.prompts))

    async def post(
        self, body: bytes | Iterable[bytes], query: str = "?source=web", **headers: str
    ) -> tuple[int, list[object]]:
        async def chunks() -> AsyncIterator[bytes]:
            for chunk in [body] if isinstance(body, bytes) else body:
                yield chunk

        publishing = asyncio.create_task(self.publish())
        content = body if isinstance(body, bytes) else chunks()
        answer = await self.client.post("/v1/prompts" + query, content=content, headers=headers)
        publishing.cancel()
        return answer.status_code, [msgspec.json.decode(line) for line in answer.content.splitlines()]


async def test_lines_are_numbered_as_they_were_sent_whatever_the_chunks() -> None:
    body = b"\xef\xbb\xbf1\n\n  2\r\nx\n3"
    for chunks in ([body], [bytes([byte]) for byte in body], [body[:5], b"", body[5:]]):
        status, results = await Desk(settings()).post(chunks)
        assert status == 200
        assert results == [
            {"line": 1, "status": "published", "ids": [f"{1:032x}"]},
            {"line": 3, "status": "published", "ids": [f"{2:032x}"]},
            {"line": 4, "status": "refused", "reason": "no_number", "detail": "why"},
            {"line": 5, "status": "published", "ids": [f"{3:032x}"]},
        ]


@pytest.mark.parametrize("length", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1])
async def test_a_line_too_long_is_refused_and_the_next_one_is_not(length: int) -> None:
    chunks = [b"1" * (length // 2), b"1" * (length - length // 2), b"\n7\n"]
    status, results = await Desk(settings(http_max_body_bytes=2**30)).post(chunks)
    assert status == 200
    first, second = results
    assert first["status"] == ("refused" if length > MAX_LINE_BYTES else "published")  # type: ignore[index]
    assert second == {"line": 2, "status": "published", "ids": [f"{7:032x}"]}


async def test_the_token_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    given = settings(http_token=Secret(token := "a-token-nobody-may-see"))
    app, answers = PromptsApi(given, Desk(given).intake, lambda: True).app, list[str]()
    address = msgspec.structs.replace(given, http_port=free_ports(1)[0])
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{address.http_port}")
    async with served(app, address), client:
        for how in (f"Bearer {token}", f"Bearer {token}x", f"Basic {token}"):
            answer = await client.post("/v1/prompts?source=web", content=b"1", headers={"Authorization": how})
            answers.append(f"{answer.status_code} {answer.text} {answer.headers}")
    assert [answer[:3] for answer in answers] == ["429", "401", "401"]
    logged = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert token not in "".join([logged, *answers, repr(given)])


async def test_requests_share_a_transaction() -> None:
    desk = Desk(settings())
    posts = [asyncio.create_task(desk.intake.push("web", [(1, b"%d" % number, False)])) for number in range(5)]
    parts: list[Part] = []
    while len(parts) < 5:
        await desk.intake.arrived.wait()
        parts += desk.intake.take(1000)
    assert [part.batch.mark.row for part in parts] == [1, 2, 3, 4, 5]
    assert [part.batch.mark.records for part in parts] == [1, 2, 3, 4, 5]
    for part in parts:
        assert part.published is not None
        part.published.set_result(frozenset())
    assert [result[0].status for result in await asyncio.gather(*posts)] == ["repeated"] * 5


async def test_a_source_with_samples_gives_fewer_records_to_a_transaction() -> None:
    desk = Desk(settings(), source(samples=2))
    await desk.post(b"".join(b"%d\n" % n for n in range(8)))
    assert [len(part.batch.lines) for parts in desk.transactions for part in parts] == [2, 2, 2, 2]


async def test_nobody_waits_for_ever_when_a_transaction_fails() -> None:
    desk = Desk(settings())
    post = asyncio.create_task(desk.client.post("/v1/prompts?source=web", content=b"1\n"))
    await desk.intake.arrived.wait()
    desk.intake.take(1000)
    desk.intake.close("Kafka gave no answer")
    answer = await post
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "Kafka gave no answer" in answer.text


@pytest.mark.parametrize("edited", [[], [source(revision=1)]], ids=["gone", "asks anew"])
async def test_what_was_made_for_a_source_that_is_edited_is_sent_back(edited: list[Source]) -> None:
    desk = Desk(settings())
    post = asyncio.create_task(desk.client.post("/v1/prompts?source=web", content=b"1\n"))
    await desk.intake.arrived.wait()
    desk.intake.open([*edited, Source(name="other", files=["a"], max_new_tokens=1)], {})
    assert (await post).status_code == 503
    assert desk.intake.take(1000) == []


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("?source=web", {}, 401),
        ("?source=web", {"Authorization": "Bearer wrong"}, 401),
        ("?source=web", {"Authorization": "Basic token"}, 401),
        ("?source=other", {"Authorization": "Bearer token"}, 404),
        ("", {"Authorization": "Bearer token"}, 404),
        ("?source=web", {"Authorization": "Bearer token", "Content-Encoding": "gzip"}, 415),
        ("?source=web", {"Authorization": "Bearer token"}, 200),
    ],
)
async def test_who_may_push_what(query: str, headers: dict[str, str], status: int) -> None:
    desk = Desk(settings(http_token=Secret("token")))
    assert (await desk.post(b"1\n", query, **headers))[0] == status
    assert bool(desk.transactions) == (status == 200)


_line = st.binary(max_size=6) | st.sampled_from([b"12", b" 7 ", b"", b"\r", b"\xef\xbb\xbf1", b"{"])


@given(lines=st.lists(_line, max_size=12), cuts=st.lists(st.integers(0, 80), max_size=5), ended=st.booleans())
@hypothesis_settings(max_examples=200, deadline=None)
def test_a_body_of_any_bytes_in_any_chunks_is_answered_line_by_line(
    lines: list[bytes], cuts: list[int], ended: bool
) -> None:
    body = b"\n".join(lines) + (b"\n" if ended else b"")
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    status, results = asyncio.run(_posted([body[start:end] for start, end in itertools.pairwise(places)]))
    sent = [line.strip() for line in body.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    assert status == 200
    assert [(result["line"], result["status"]) for result in results] == [  # type: ignore[index]
        (number, "published" if line.isdigit() else "refused") for number, line in enumerate(sent, 1) if line
    ]


async def _posted(chunks: list[bytes]) -> tuple[int, list[object]]:
    return await Desk(settings()).post(chunks)


@given(
    query=st.text(max_size=20).map(lambda text: "?" + quote(text, safe="=&%+")),
    names=st.lists(
        st.sampled_from(["Authorization", "Content-Encoding", "Content-Length", "Content-Type", "Expect", "X-Any"]),
        unique=True,
    ),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_a_request_with_anything_in_its_head_is_refused_by_name(query: str, names: list[str], value: str) -> None:
    async def ask() -> httpx.Response:
        desk = Desk(settings(http_token=Secret("token")))
        headers = [(name.encode(), value.encode("latin-1")) for name in names]
        return await desk.client.post("/v1/prompts" + query, content=b"1\n", headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == 401
    assert "bearer token" in answer.text
    assert "token" not in answer.text.replace("a bearer token is needed", "")


_text = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20)
_length = st.integers(-(2**70), 2**70).map(str) | st.sampled_from(
    ["", "+1", "1_0", " 2", "2,2", "0x2", "\xb2", "9" * 5000]
)
_HEADERS = {
    "Content-Length": _length | _text,
    "Content-Type": st.sampled_from(["application/json", "multipart/form-data; boundary=x"]) | _text,
    "Content-Encoding": st.sampled_from(["gzip", "identity", "br, gzip"]) | _text,
    "Transfer-Encoding": st.just("chunked") | _text,
}


@given(
    query=st.just("?source=web") | st.text(max_size=20).map(lambda text: "?" + quote(text, safe="=&%+")),
    headers=st.fixed_dictionaries({}, optional=_HEADERS),
    body=st.lists(_line, max_size=6).map(b"\n".join) | st.binary(max_size=60),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_whoever_has_the_token_is_answered_whatever_is_sent(query: str, headers: dict[str, str], body: bytes) -> None:
    async def ask() -> tuple[httpx.Response, Desk]:
        desk = Desk(settings(http_token=Secret("token")))
        raw = [(b"Authorization", b"Bearer token")]
        raw += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        publishing = asyncio.create_task(desk.publish())
        answer = await desk.client.post("/v1/prompts" + query, content=body, headers=raw)
        publishing.cancel()
        return answer, desk

    answer, desk = asyncio.run(ask())
    answers = [msgspec.json.decode(line) for line in answer.content.splitlines()]
    assert answer.status_code in (200, 400, 404, 413, 415)
    assert not desk.failures
    if answer.status_code == 200:
        assert all(result["status"] in ("published", "refused") for result in answers)
    else:
        assert answers[0]["error"]
        assert not desk.transactions


@pytest.mark.parametrize("length", ["many", "", "-1", "1_0", "\xb2", "9" * 5000])
async def test_a_length_that_is_none_is_refused(length: str) -> None:
    answer = await Desk(settings()).client.post(
        "/v1/prompts?source=web", content=b"1\n", headers=[(b"Content-Length", length.encode("latin-1"))]
    )
    assert answer.status_code == 400
    assert answer.json()["error"] == "content-length must be the number of the body's bytes"


async def test_a_body_too_large_is_not_taken_and_one_without_a_length_not_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(settings())
    assert (await desk.post(b"1\n" * 600))[0] == 413
    assert not desk.transactions
    status, results = await desk.post([b"1\n2\n3\n4\n", b"5\n" * 600])
    assert (status, results[0]["lines_done"]) == (413, 4)  # type: ignore[index]
    monkeypatch.setattr(api, "MAX_LINES", 2)
    assert (await desk.post([b"1\n2\n3\n", b"4\n"]))[0] == 413


async def test_who_sends_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_SILENCE_SECONDS", 0.01)

    async def silence() -> AsyncIterator[bytes]:
        yield b"1\n"
        await asyncio.Event().wait()

    answer = await Desk(settings()).client.post("/v1/prompts?source=web", content=silence())
    assert answer.status_code == 408


async def test_a_limit_holds_within_a_request_and_over_many_at_once() -> None:
    desk = Desk(settings(), source(limit=10))
    status, (answer,) = await desk.post(b"".join(b"%d\n" % n for n in range(40)))
    assert (status, answer["lines_done"]) == (409, 10)  # type: ignore[index]
    assert desk.transactions[-1][-1].batch.mark.records == 10
    assert (await desk.post(b"41\n"))[0] == 409

    desk = Desk(settings(), source(limit=10))
    answers = await asyncio.gather(*[desk.post(b"%d\n%d\n" % (n, n + 100)) for n in range(9)])
    assert Counter(status for status, _ in answers) == {200: 5, 409: 4}
    desk.intake.close("Kafka gave no answer")
    desk.intake.open([source(limit=11)], {"web": {FILE: Mark(records=10)}})
    assert [status for status, _ in [await desk.post(b"1\n"), await desk.post(b"2\n")]] == [200, 409]


async def test_a_sample_leaves_records_out_and_says_so() -> None:
    _, results = await Desk(settings(), source(sample=Sample(0.5, 3))).post(b"".join(b"%d\n" % n for n in range(40)))
    counts = Counter(result["status"] for result in results)  # type: ignore[index]
    assert set(counts) == {"published", "left_out"}
    assert 10 < counts["left_out"] < 30


@pytest.mark.parametrize("kind", [Fatal, TokenhaulError], ids=["fatal", "a process of the tokenizer died"])
async def test_a_fatal_error_ends_the_service_not_only_the_request(kind: type[TokenhaulError]) -> None:
    def broken(batch: Batch) -> Made:
        raise kind("the tokenizer is another model's")

    desk = Desk(settings())
    desk.intake = Intake(broken, desk.failures.append)
    desk.intake.open([source()], {})
    desk.client = httpx.AsyncClient(
        transport=httpx.ASGITransport(PromptsApi(settings(), desk.intake, lambda: False).app), base_url="http://ingest"
    )
    assert (await desk.post(b"1\n"))[0] == 503
    assert "another model's" in str(desk.failures[0])


def test_an_address_others_can_reach_needs_a_token() -> None:
    for host in ("0.0.0.0", "10.0.0.5", "::", "ingest.example"):
        with pytest.raises(SettingsError, match="set TOKENHAUL_INGEST_HTTP_TOKEN"):
            check(settings(http_host=host, http_port=80))
        check(settings(http_host=host, http_port=80, http_token=Secret("token")))
        check(settings(http_host=host))
    for host in ("127.0.0.1", "::1", "localhost"):
        check(settings(http_host=host, http_port=80))
