"""A batch and its cursor are published in one transaction, once, by the one ingest there is."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from aiokafka.errors import KafkaTimeoutError, ProducerFenced

from schemas import ids
from schemas.control import Control, Idle, SourceTotals
from schemas.cursors import Cursor
from services.ingest import portions as portions_module
from services.ingest import transactions
from services.ingest.intake import Part
from services.ingest.ledger import Ledger
from services.ingest.lines import Line, Mark
from services.ingest.metrics import IngestMetrics
from services.ingest.prompts import Letter, Made, Ready
from services.ingest.reader import Batch
from services.ingest.request import Request
from services.ingest.sources import Source
from services.kernel.codec import Decoder, Encoder
from services.kernel.errors import Fatal, Retry
from tests.support.ingest import FakeKafka, FakeProducer

PARTITIONS = 4
SOURCE = Source(name="s", files=["f.jsonl"], max_new_tokens=1)


@pytest.fixture
def metrics() -> IngestMetrics:
    return IngestMetrics()


def request(settings: bytes = b"asked") -> Request:
    return Request(
        source=SOURCE,
        model="m",
        vocab_size=10,
        context_length=10,
        samplings=[(1.0, {})],
        reasoning=None,
        tokenizer_fingerprint="",
        settings=settings,
    )


def ready(number: int) -> Ready:
    return Ready(number.to_bytes(16, "big"), b"value %d" % number, 10, number)


def batch(offset: int, lines: int = 2) -> Batch:
    return Batch(SOURCE, "f.jsonl", [Line(1, b"x")] * lines, Mark(offset, lines, b"head", offset))


def made(*prompts: Ready, refused: str = "") -> Made:
    letters = [Letter(b"s:f.jsonl:9", b"letter", 9, refused, "why")] if refused else []
    return Made(list(prompts), letters, Counter([refused] if refused else []))


async def ledger(kafka: FakeKafka, metrics: IngestMetrics, begun: bool = True) -> Ledger:
    opened = Ledger(kafka, FakeProducer(kafka), PARTITIONS, metrics)
    await opened.recover()
    if begun:
        opened.begin([SOURCE], {"s": request()})
    return opened


async def publish(opened: Ledger, batch: Batch, made: Made) -> None:
    for portion in opened.portions([Part(batch, made)]):
        await opened.publish(portion)


def cursor(kafka: FakeKafka) -> Cursor:
    return Decoder(Cursor).decode(kafka.topic("cursors")[-1].value)


async def test_prompts_letters_and_cursor_go_together(metrics: IngestMetrics) -> None:
    transactions = []
    kafka = FakeKafka()
    kafka.on_commit = lambda: transactions.append(sum(map(len, kafka.records.values())))
    opened = await ledger(kafka, metrics)
    await publish(opened, batch(20, lines=3), made(ready(6), ready(7), refused="not_json"))
    assert transactions == [4]
    one, two = kafka.topic("prompts")
    assert (one.value, one.key, one.partition) == (b"value 6", None, 2)
    assert one.headers == [("schema", b"prompt.v1"), ("id", ready(6).id)]
    assert two.partition == ids.partition(ready(7).id, PARTITIONS)
    (letter,) = kafka.topic("dead")
    assert (letter.value, letter.key, letter.headers) == (b"letter", b"s:f.jsonl:9", [("schema", b"dead.v1")])
    assert [record.key for record in kafka.topic("cursors")] == [b"s\0f.jsonl"]
    assert cursor(kafka) == Cursor(
        source="s", file="f.jsonl", revision=0, offset=20, row=3, head=b"head", head_bytes=20, settings=b"asked",
        published=2, repeated=0, refused={"not_json": 1},
    )  # fmt: skip


async def test_nothing_is_published_twice(metrics: IngestMetrics) -> None:
    """Neither what the topic holds at the start, nor what was published since, nor what a batch holds twice."""
    kafka = FakeKafka()
    kafka.topic("prompts").append(SimpleNamespace(value=b"value 1", headers=[("id", ready(1).id)]))
    opened = await ledger(kafka, metrics)
    await publish(opened, batch(10), made(ready(1), ready(2), ready(2)))
    await publish(opened, batch(20), made(ready(2), ready(3)))
    assert [record.value for record in kafka.topic("prompts")] == [b"value 1", b"value 2", b"value 3"]
    assert (cursor(kafka).published, cursor(kafka).repeated) == (2, 3)


async def test_many_prompts_take_transactions_of_bounded_size_and_a_crash_between_them_loses_and_repeats_nothing(
    metrics: IngestMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most three prompts, or as many bytes as two have; the cursor moves with the last."""
    monkeypatch.setattr(portions_module, "MOST_PROMPTS", 3)
    monkeypatch.setattr(portions_module, "MOST_BYTES", 100)
    large = [Ready(number.to_bytes(16, "big"), b"x" * 50, 10, number) for number in (10, 11, 12)]
    part = made(*map(ready, range(1, 6)), *large, ready(1), refused="not_json")
    kafka = FakeKafka(None, KafkaTimeoutError())
    with pytest.raises(Retry):
        await publish(await ledger(kafka, metrics), batch(20), part)
    assert [record.value for record in kafka.topic("prompts")] == [b"value 1", b"value 2", b"value 3"]
    assert (cursor(kafka).offset, cursor(kafka).published, kafka.topic("dead")) == (0, 3, [])

    sizes: list[int] = []
    kafka.on_commit = lambda: sizes.append(len(kafka.topic("prompts")) - 3 - sum(sizes))
    again = await ledger(kafka, metrics, begun=False)
    assert again.begin([SOURCE], {"s": request()})["s"]["f.jsonl"] == Mark()
    await publish(again, batch(20), part)
    assert sizes == [3, 2], "4, 5 and one of the large ones; two of those"
    assert len({record.headers[1] for record in kafka.topic("prompts")}) == len(kafka.topic("prompts")) == 8
    assert (cursor(kafka).offset, cursor(kafka).published, cursor(kafka).refused) == (20, 8, {"not_json": 1})
    assert len(kafka.topic("dead")) == 1
    assert metrics.registry.get_sample_value("tokenhaul_ingest_published_total", {"source": "s"}) == 8


async def test_of_records_that_are_alike_the_first_is_cited(metrics: IngestMetrics) -> None:
    kafka = FakeKafka()
    first, tenth = ready(1)._replace(value=b"row 1"), ready(1)._replace(value=b"row 10", row=10)
    await publish(await ledger(kafka, metrics), batch(10), made(first, tenth))
    assert [record.value for record in kafka.topic("prompts")] == [b"row 1"]


async def test_a_batch_of_nothing_new_still_moves_the_cursor(metrics: IngestMetrics) -> None:
    kafka = FakeKafka()
    await publish(await ledger(kafka, metrics), batch(10, lines=0), made())
    assert cursor(kafka).offset == 10


async def test_a_restart_goes_on_behind_the_last_cursor(metrics: IngestMetrics) -> None:
    kafka = FakeKafka()
    opened = await ledger(kafka, metrics)
    for offset in (10, 20):
        await publish(opened, batch(offset), made(ready(offset)))
    again = await ledger(kafka, metrics, begun=False)
    assert again.begin([SOURCE], {"s": request()})["s"]["f.jsonl"].offset == 20
    with pytest.raises(Fatal, match="raise its revision to 1"):
        again.begin([SOURCE], {"s": request(b"other")})


async def test_a_cursor_of_a_later_version_stops_the_start(metrics: IngestMetrics) -> None:
    kafka = FakeKafka()
    foreign = Encoder().encode(Idle(run="r", sources={}, created_at=1.0))
    kafka.topic("cursors").append(SimpleNamespace(value=foreign, topic="t.cursors", offset=5))
    with pytest.raises(Fatal, match=r"t\.cursors, offset 5: not a cursor this version of tokenhaul reads"):
        await ledger(kafka, metrics)


async def test_the_idle_mark_carries_the_totals(metrics: IngestMetrics) -> None:
    kafka = FakeKafka()
    opened = await ledger(kafka, metrics)
    await publish(opened, batch(10), made(ready(1), refused="not_json"))
    await opened.idle("run-7", ["s", "empty"], {"empty": "broken"})
    (record,) = kafka.topic("control")
    assert (record.key, record.headers) == (b"idle/run-7", [("schema", b"idle.v1")])
    mark = Decoder[Control](Control).decode(record.value)  # type: ignore[arg-type]
    assert isinstance(mark, Idle)
    assert mark.sources == {
        "s": SourceTotals(published=1, refused={"not_json": 1}),
        "empty": SourceTotals(stopped="broken"),
    }


async def test_another_ingest_is_made_way_for(metrics: IngestMetrics) -> None:
    opened = await ledger(FakeKafka(ProducerFenced()), metrics)
    with pytest.raises(Fatal, match="another ingest took over"):
        await publish(opened, batch(10), made(ready(1)))


async def test_a_transaction_kafka_gave_up_is_tried_again(
    metrics: IngestMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like being fenced, but so much time went by that it need not be."""
    monkeypatch.setattr(transactions, "TRANSACTION_SECONDS", 0.0)
    opened = await ledger(FakeKafka(ProducerFenced()), metrics)
    with pytest.raises(Retry, match="Kafka gave the transaction up"):
        await publish(opened, batch(10), made(ready(1)))


async def test_a_failed_transaction_is_told_and_nothing_counts_as_published(metrics: IngestMetrics) -> None:
    kafka = FakeKafka(KafkaTimeoutError(), None)
    opened = await ledger(kafka, metrics)
    with pytest.raises(Retry, match="a transaction failed"):
        await publish(opened, batch(10), made(ready(1)))
    await publish(opened, batch(10), made(ready(1)))
    assert cursor(kafka).published == 1


async def test_what_was_done_is_counted_by_source_and_reason(metrics: IngestMetrics) -> None:
    opened = await ledger(FakeKafka(), metrics)
    await publish(opened, batch(10, lines=4), made(ready(1), ready(1), ready(2), refused="not_json"))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("tokenhaul_ingest_seen_total", source="s") == 4
    assert value("tokenhaul_ingest_published_total", source="s") == 2
    assert value("tokenhaul_ingest_repeated_total", source="s") == 1
    assert value("tokenhaul_ingest_refused_total", source="s", reason="not_json") == 1
    assert value("tokenhaul_rejected_total", stage="ingest", reason="not_json") == 1
    assert value("tokenhaul_ingest_prompt_tokens_total", source="s") == 20
    assert value("tokenhaul_records_out_total", stage="ingest") == 2
    assert value("tokenhaul_ingest_transaction_seconds_count") == 1
