"""What the tests of ingest share: tokenizers, the shipped prompts, a maker of prompts, a Kafka that is a dictionary."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from schemas.control import Control
from services.ingest import model, request
from services.ingest.lines import Line, Lines, Mark, take_lines
from services.ingest.prompts import PromptMaker
from services.ingest.settings import IngestSettings
from services.ingest.sources import Source
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.codec import Decoder
from services.kernel.control import ControlView
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings

DATA = Path(__file__).parents[1] / "data"
PROMPTS = sorted((DATA / "prompts").glob("*.jsonl"))
KIMI = DATA / "tokenizers" / "kimi-like"
DAY = "2026-07-26"
SMOLLM2 = Path(__file__).parents[2] / "services" / "local" / "data" / "smollm2"


@cache
def tokenizer(directory: Path) -> ChatTokenizer:
    """Loaded once: they are not changed by use."""
    return ChatTokenizer(directory)


def with_template(template: str, folder: Path, base: Path = KIMI) -> Path:
    """A copy of `base` with another chat template."""
    directory = folder / "tokenizer"
    shutil.copytree(base, directory)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def maker(
    directory: Path = SMOLLM2,
    *,
    store_messages: bool = True,
    context: int = 0,
    vocab: int = 0,
    used: ChatTokenizer | None = None,
    **asks: Any,
) -> PromptMaker:
    """The maker of a source that asks `asks`, for the tokenizer in `directory`."""
    source = msgspec.convert({"name": "s", "files": ["s.jsonl"], "max_new_tokens": 64, **asks}, Source)
    settings = IngestSettings(sources_file="", tokenizer=str(directory), context_length=context, vocab_size=vocab)
    used = used or tokenizer(directory)
    asked = request.resolve(source, "the-model", model.load(settings, directory), used, DAY)
    return PromptMaker(asked, used, store_messages=store_messages)


def lines(*records: Any) -> list[Line]:
    """Lines as they are read from a file: bytes as they are, anything else as JSON."""
    return [
        Line(row, record if isinstance(record, bytes) else msgspec.json.encode(record))
        for row, record in enumerate(records, 1)
    ]


def chat(*contents: str) -> dict[str, Any]:
    """A record of user and assistant turns in alternation."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]}


def read_lines(file: Path, mark: Mark, *, buffer_bytes: int = 4096, **how: Any) -> Lines:
    """The lines of a file behind `mark`, read in chunks of `buffer_bytes`."""
    with open(file, "rb", buffering=buffer_bytes) as opened:
        return take_lines(opened, mark, **how)


class FakeKafka(Kafka):
    """Topics as lists of committed records. `answers` says, commit by commit, what goes wrong: None is well."""

    def __init__(self, *answers: BaseException | None, answer_lost: bool = False) -> None:
        super().__init__(KafkaSettings(bootstrap=["nowhere:1"], prefix="t"))
        self.records: dict[str, list[Any]] = {}
        self.answers, self.answer_lost = list(answers), answer_lost
        self.on_commit: Callable[[], None] = lambda: None
        self.commits = 0

    def topic(self, name: str) -> list[Any]:
        """The committed records of `<prefix>.<name>`."""
        return self.records.setdefault(f"t.{name}", [])

    @asynccontextmanager
    async def started(self, make: Any, stopping: Any = None) -> AsyncIterator[Any]:
        yield FakeProducer(self)

    async def read_all(self, topic: str, isolation: Any = "read_committed") -> AsyncIterator[Any]:
        for record in list(self.records.get(topic, [])):
            yield record

    def commit(self, records: list[Any]) -> None:
        """Take a transaction, or fail: before it is taken, or after it with the answer lost."""
        self.commits += 1
        error = self.answers.pop(0) if self.answers else None
        if error is None or self.answer_lost:
            for record in records:
                self.records.setdefault(record.topic, []).append(record)
        if error is not None:
            raise error
        self.on_commit()


@asynccontextmanager
async def following(kafka: FakeKafka, spawn: Any) -> AsyncIterator[ControlView]:
    """As services.kernel.control.following: what stands on the control topic now."""
    view = ControlView()
    decoder: Decoder[Control] = Decoder(Control)  # type: ignore[arg-type]
    for record in kafka.topic("control"):
        view.update(record.key, decoder.decode(record.value))
    yield view


class FakeBatch:
    """aiokafka's BatchBuilder, of so many bytes."""

    def __init__(self, most: int = 64 * 1024) -> None:
        self.records: list[Any] = []
        self._room = most

    def append(self, *, timestamp: None, key: Any, value: bytes, headers: Any) -> object | None:
        if self.records and len(value) > self._room:
            return None
        self._room -= len(value)
        self.records.append(SimpleNamespace(value=value, key=key, headers=headers))
        return object()


class FakeProducer:
    """A transactional producer of a FakeKafka."""

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka
        self._open: list[Any] = []

    async def begin_transaction(self) -> None:
        self._open = []

    async def send(self, topic: str, value: bytes, key: Any, *, headers: Any) -> asyncio.Future[None]:
        return self._take(topic, None, [SimpleNamespace(value=value, key=key, headers=headers)])

    def create_batch(self) -> FakeBatch:
        return FakeBatch()

    async def send_batch(self, batch: FakeBatch, topic: str, *, partition: int) -> asyncio.Future[None]:
        return self._take(topic, partition, batch.records)

    def _take(self, topic: str, partition: int | None, records: list[Any]) -> asyncio.Future[None]:
        for record in records:
            record.topic, record.partition, record.offset = topic, partition, 0
        self._open += records
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def commit_transaction(self) -> None:
        self._kafka.commit(self._open)
