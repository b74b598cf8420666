"""`tokenhaul push FILE... --url URL --source NAME`: hand records to an ingest that runs.

Requests that failed are sent again: what was published by then is `repeated`, nothing is asked twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import httpx
import msgspec

from services.ingest import places
from services.ingest.intake import Result
from services.ingest.lines import MAX_LINE_BYTES, Line, Mark, as_line, next_line
from services.ingest.stored import Broken
from services.kernel.errors import Fatal, SettingsError, TokenhaulError
from services.kernel.masking import masked
from services.kernel.retry import Backoff

_LINES, _BYTES = 2000, 8 * 1024 * 1024  # of a request
_LATER = (408, 429, 500, 502, 503, 504)
_ASKED_WRONG = (401, 404)  # the token, --source or --url
_ATTEMPTS = 20  # that fail one after another; a full backlog is no failure
_results = msgspec.json.Decoder(Result)


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul push`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"ends in {places.KINDS}; - is JSON lines from stdin")
    parser.add_argument("--url", required=True, help="where ingest serves POST /v1/prompts, as http://host:port")
    parser.add_argument("--source", required=True, metavar="NAME", help="a source declared there with `http: true`")
    parser.epilog = "The bearer token, where one is needed, comes from TOKENHAUL_INGEST_HTTP_TOKEN."


def command(arguments: argparse.Namespace) -> int:
    """Push; 0 when every record was taken, 1 when some were refused, 2 for wrong arguments, 3 when it cannot go on."""
    token = os.environ.get("TOKENHAUL_INGEST_HTTP_TOKEN", "").strip()
    counts: Counter[str] = Counter()
    try:
        if masked(arguments.url) != arguments.url:
            raise SettingsError(
                f"--url {masked(arguments.url)} has a user or a password in it: the token goes into "
                "TOKENHAUL_INGEST_HTTP_TOKEN"
            )
        for file in arguments.files:
            if file != "-" and not (Path(file).is_file() and places.kind_of(file)):
                raise SettingsError(f"{file} is no file that ends in {places.KINDS}")
        with httpx.Client(timeout=120.0, headers={"Authorization": f"Bearer {token}"} if token else {}) as client:
            for file in arguments.files:
                for lines in _requests(file):
                    counts += _push(client, arguments.url, arguments.source, file, lines)
    except TokenhaulError as error:
        print(f"tokenhaul: {error}", file=sys.stderr)
        return error.status
    finally:
        print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing was pushed")
    return 1 if counts["refused"] else 0


def _push(client: httpx.Client, url: str, source: str, file: str, lines: Sequence[Line]) -> Counter[str]:
    """One request, again and again until it is answered; what became of its lines. Refused ones are told of."""
    rows = [line.row for line in lines if not line.too_long]
    body = b"".join(line.data + b"\n" for line in lines if not line.too_long)
    counts: Counter[str] = Counter()
    for line in lines:
        if line.too_long:
            counts["refused"] += 1
            print(f"{file}:{line.row}: line_too_long: more than {MAX_LINE_BYTES} bytes", file=sys.stderr)
    for result in _answer(client, url, source, body) if rows else ():
        counts[result.status] += 1
        if result.status == "refused":
            print(f"{file}:{rows[result.line - 1]}: {result.reason}: {result.detail}", file=sys.stderr)
    return counts


def _answer(client: httpx.Client, url: str, source: str, body: bytes) -> list[Result]:
    backoff, failures = Backoff(base=0.5, cap=30.0), 0
    while True:
        asked = None
        try:
            answer = client.post(f"{url.rstrip('/')}/v1/prompts", params={"source": source}, content=body)
        except httpx.TransportError as error:
            why, failures = f"{url}: {error!r}", failures + 1
        else:
            if answer.status_code == 200:
                return [_results.decode(line) for line in answer.content.splitlines()]
            why = f"{url} answers {answer.status_code}: {answer.text.strip()[:500]}"
            if answer.status_code in _ASKED_WRONG:
                raise SettingsError(why)
            if answer.status_code not in _LATER:
                raise Fatal(why)
            failures += answer.status_code != 429
            if (given := answer.headers.get("retry-after", "")).isdigit():
                asked = float(given)
        if failures >= _ATTEMPTS:
            raise Fatal(f"given up after {failures} attempts: {why}")
        wait = backoff.next(asked)
        print(f"tokenhaul: {why}; again in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)


def _requests(file: str) -> Iterator[list[Line]]:
    """The records of a file, as many at a time as a request takes."""
    batch: list[Line] = []
    size = 0
    for line in _stdin() if file == "-" else _lines(Path(file)):
        batch.append(line)
        size += len(line.data)
        if len(batch) >= _LINES or size >= _BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lines(path: Path) -> Iterator[Line]:
    source = places.file_input(path)
    mark = Mark()
    try:
        while True:
            taken = source.read(mark, max_lines=_LINES, take_rest=True)
            if taken.mark == mark:
                return
            yield from taken.lines
            mark = taken.mark
    except (OSError, Broken) as error:
        raise Fatal(f"{path} cannot be read: {error}") from error
    finally:
        source.close()


def _stdin() -> Iterator[Line]:
    row = 0
    while taken := next_line(cast(BinaryIO, sys.stdin.buffer), MAX_LINE_BYTES, take_rest=True):
        row += 1
        if line := as_line(row, taken[0], taken[2]):
            yield line
