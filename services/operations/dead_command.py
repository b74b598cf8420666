"""`tokenhaul dead list|show|replay|drop`: what failed or was refused, and what is to become of it.

`replay` and `drop` say what they would do, and do it with --yes. A replay is a command to ingest, which alone publishes
prompts: it asks again under the same record id, and a row that comes of it supersedes the failure. A row may also come
without a replay, of another generator: only the shards tell, so `list`, `show` and `replay` look there when they can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from schemas.control import Dataset, Drop, Replay, drop_key, replay_key
from schemas.ids import ID_BYTES
from services.dataset.cli import positive, reports_errors
from services.kernel import logs, topics
from services.kernel.codec import Encoder, schema_of
from services.kernel.errors import TokenhaulError
from services.kernel.kafka import Kafka
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.settings import load
from services.operations import letters, superseded
from services.operations.letters import Letter

_IDS_PER_REPLAY = 500
"""Their prompts go in one transaction, which must be over within 15 seconds."""
_KEYS_PER_DROP = 50_000


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul dead`. Where Kafka is comes from TOKENHAUL_KAFKA_*."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|replay|drop")
    texts = {
        "list": "count them by stage, reason and source",
        "show": "the last ones, with file, line and cause",
        "replay": "ask the failed prompts again, under their own record ids",
        "drop": "list them no more; they stay on the topic",
    }
    for action, text in texts.items():
        parser = actions.add_parser(action, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.add_argument("--reason", action="append", metavar="R", help="only of this reason (repeat for more)")
        parser.add_argument("--source", action="append", metavar="S", help="only of this source (repeat for more)")
        parser.add_argument("--stage", choices=("ingest", "generator", "sink"), help="only of this stage")
        parser.add_argument(
            "--id", action="append", type=_record_id, metavar="ID", help="only this record (repeat for more)"
        )
        if action in ("list", "show"):
            parser.add_argument("--json", action="store_true", help="as JSON, for tools")
        else:
            parser.add_argument("--yes", action="store_true", help="do it; without, say only what would be done")
        if action != "drop":
            parser.add_argument(
                "--root", default=os.environ.get("TOKENHAUL_SINK_ROOT", ""), metavar="PLACE",
                help="where the shards are: failures that are rows by now are left out. Without, those of which a row "
                "came with no replay are not known: they are listed, and a replay pays for them again "
                "(default: TOKENHAUL_SINK_ROOT)",
            )  # fmt: skip
        if action == "show":
            parser.add_argument("--limit", type=positive, default=10, metavar="N", help="(default %(default)s)")


@reports_errors
def command(arguments: argparse.Namespace) -> int:
    """Read the letters, and do with them what is asked."""
    logs.configure("auto", "warning")
    kafka = Kafka(load(KafkaSettings, os.environ))
    found = asyncio.run(_read(kafka, arguments))
    console = Console(highlight=False, soft_wrap=True)
    match arguments.action:
        case "list":
            _list(found, console, as_json=arguments.json)
        case "show":
            _show(found, console, arguments.limit, as_json=arguments.json)
        case "replay":
            _replay(kafka, found, console, really=arguments.yes)
        case "drop":
            _drop(kafka, found, console, really=arguments.yes)
    return 0


async def _read(kafka: Kafka, arguments: argparse.Namespace) -> dict[bytes, Letter]:
    frozen = await topics.check(kafka)
    ids = set(arguments.id) if arguments.id else None

    def wanted(letter: Letter) -> bool:
        return (
            (not arguments.reason or letter.reason in arguments.reason)
            and (not arguments.source or letter.source in arguments.source)
            and (not arguments.stage or letter.stage == arguments.stage)
            and (ids is None or letter.id in ids)
        )

    found = await letters.read(kafka, wanted)
    if arguments.action == "drop":
        return found
    rows = await asyncio.to_thread(_rows, found, arguments, frozen, kafka)
    if rows:
        print(f"{len(rows)} letters are left out: their records are rows by now", file=sys.stderr)
    return {key: letter for key, letter in found.items() if key not in rows}


def _rows(found: Mapping[bytes, Letter], arguments: argparse.Namespace, frozen: Dataset, kafka: Kafka) -> set[bytes]:
    """Which of them are rows by now. Who only looks is told when that is not known; a replay would be paid for."""
    if not arguments.root:
        if arguments.action == "replay":
            print("not known without --root: whether some of them are rows by now", file=sys.stderr)
        return set()
    try:
        return superseded.among(found, arguments.root, frozen, kafka)
    except TokenhaulError as error:
        if arguments.action == "replay":
            raise
        print(f"not known whether some of them are rows by now (--root): {error}", file=sys.stderr)
        return set()


def _record_id(text: str) -> bytes:
    """32 hex digits."""
    try:
        id = bytes.fromhex(text)
    except ValueError:
        id = b""
    if len(id) != ID_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no record id: {2 * ID_BYTES} hex digits")
    return id


def _list(found: Mapping[bytes, Letter], console: Console, *, as_json: bool) -> None:
    counts = Counter((letter.stage, letter.reason, letter.source or "") for letter in found.values())
    if as_json:
        rows = [
            {"stage": stage, "reason": reason, "source": source, "letters": count}
            for (stage, reason, source), count in sorted(counts.items())
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table("stage", "reason", "source", "letters", box=box.SIMPLE_HEAD)
    for (stage, reason, source), count in sorted(counts.items()):
        table.add_row(stage, reason, source, f"{count:,}")
    console.print(table if counts else "nothing is dead")


def _show(found: Mapping[bytes, Letter], console: Console, limit: int, *, as_json: bool) -> None:
    last = sorted(found.values(), key=lambda letter: letter.created_at)[-limit:]
    if as_json:
        print(json.dumps([_plain(letter) for letter in last], indent=2, ensure_ascii=False))
        return
    for letter in last:
        console.print(f"[bold]{letter.reason}[/] at {letter.stage}, {_when(letter)}")
        for name, value in _plain(letter).items():
            if name not in ("stage", "reason", "created_at") and value is not None:
                console.print(f"  {name}: {value}", markup=False)
    if len(found) > limit:
        console.print(f"… and {len(found) - limit:,} before these (--limit)")


def _plain(letter: Letter) -> dict[str, Any]:
    ref = letter.source_ref
    return {
        "stage": letter.stage,
        "reason": letter.reason,
        "detail": letter.detail,
        "source": letter.source,
        "place": f"{ref.file}:{ref.row}" if ref else None,
        "user_id": ref.id if ref else None,
        "id": letter.id.hex() if letter.id else None,
        "record": letter.record,
        "created_at": letter.created_at,
    }


def _when(letter: Letter) -> str:
    return f"{datetime.fromtimestamp(letter.created_at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _replay(kafka: Kafka, found: Mapping[bytes, Letter], console: Console, *, really: bool) -> None:
    ids = [key for key, letter in found.items() if letter.has_prompt and letter.id == key and len(key) == ID_BYTES]
    if without := len(found) - len(ids):
        console.print(f"{without} cannot be asked again: refused by ingest (mend the file), or without a prompt")
    if not ids:
        console.print("no prompt to ask again")
        return
    _list({key: found[key] for key in ids}, console, as_json=False)
    if not really:
        console.print(f"{len(ids)} prompts would be asked again (--yes does it)")
        return
    settled = _after(found[key] for key in ids)
    commands = [
        Replay(command=uuid.uuid4().hex, ids=b"".join(part), created_at=settled)
        for part in _parts(ids, _IDS_PER_REPLAY)
    ]
    asyncio.run(_write(kafka, [(replay_key(command.command), command) for command in commands]))
    console.print(f"{len(ids)} prompts are asked again, as soon as ingest runs")


def _drop(kafka: Kafka, found: Mapping[bytes, Letter], console: Console, *, really: bool) -> None:
    _list(found, console, as_json=False)
    if not really or not found:
        console.print(f"{len(found)} letters would be dropped (--yes does it)" if found else "no letter to drop")
        return
    settled = _after(found.values())
    commands = [
        Drop(command=uuid.uuid4().hex, keys=part, created_at=settled) for part in _parts(list(found), _KEYS_PER_DROP)
    ]
    asyncio.run(_write(kafka, [(drop_key(command.command), command) for command in commands]))
    console.print(f"{len(found)} letters are dropped")


def _after(letters: Iterable[Letter]) -> float:
    """Just later than these, by the clocks of those who wrote them: by ours a letter might never be settled, or one
    that is yet to come might be."""
    return math.nextafter(max(letter.created_at for letter in letters), math.inf)


def _parts(keys: Sequence[bytes], size: int) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), size):
        yield list(keys[start : start + size])


async def _write(kafka: Kafka, messages: Sequence[tuple[bytes, msgspec.Struct]]) -> None:
    encoder = Encoder()
    async with kafka.started(kafka.producer) as producer:
        for key, message in messages:
            await producer.send_and_wait(
                kafka.topics.control, encoder.encode(message), key=key, headers=[("schema", schema_of(message))]
            )
