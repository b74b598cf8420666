"""Lines of the log as machines and people read them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from services.kernel import logs


@pytest.fixture(params=[logs.JsonFormatter, logs.HumanFormatter])
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request.param())
    log = logging.getLogger("test.logs")
    log.addHandler(handler)
    log.setLevel("INFO")
    yield stream
    log.removeHandler(handler)


async def test_lines_say_what_their_own_task_is_about(written: io.StringIO) -> None:
    log = logging.getLogger("test.logs")

    async def work(offset: int) -> None:
        logs.about(topic="t.prompts", partition=0, offset=offset)
        await asyncio.sleep(0)  # the other one is about something else meanwhile
        logs.about(record=f"{offset:032x}")
        log.info("tried\nagain", extra={"action": "retry"})

    await asyncio.gather(asyncio.create_task(work(7)), asyncio.create_task(work(8)))
    log.info("elsewhere")
    lines = written.getvalue().splitlines()
    if lines[0].startswith("{"):
        seven, eight, elsewhere = map(json.loads, lines)
        assert (seven["action"], seven["topic"], seven["partition"], seven["offset"]) == ("retry", "t.prompts", 0, 7)
        assert (seven["record"], seven["message"], seven["level"]) == (f"{7:032x}", "tried\nagain", "info")
        assert (eight["offset"], eight["record"]) == (8, f"{8:032x}")
        assert "offset" not in elsewhere
    else:
        assert lines[1].endswith(f"again topic=t.prompts partition=0 offset=7 record={7:032x} action=retry")
        assert lines[-1].endswith("elsewhere")
