"""Fixtures: an engine of each kind for the whole session, and a client for it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.contract.subjects import NAMES, OWN, REAL_URL, Subject, client_of, started


@pytest.fixture(scope="session", params=NAMES)
def engine(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine with four slots and an unbounded queue."""
    if request.param == "sglang":
        url = os.environ[REAL_URL]
        context = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["max_model_len"]
        yield Subject("sglang", url, context)
    else:
        with started(request.param, "--slots", "4") as subject:
            yield subject


@pytest.fixture(scope="session", params=OWN)
def narrow_engine(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine with one slot and one place in the queue: a real one would have to be started for it."""
    with started(request.param, "--slots", "1", "--max-queued", "1") as subject:
        yield subject


@pytest.fixture(params=OWN)
def mortal_engine(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """An engine with one slot that the test may end."""
    with started(request.param, "--slots", "1") as subject:
        yield subject


@pytest.fixture
async def client(engine: Subject) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `engine`."""
    async with client_of(engine) as opened:
        yield opened
