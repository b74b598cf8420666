"""Failpoints: off unless somebody means it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kernel import failpoints
from services.kernel.errors import Retry, SettingsError
from services.kernel.store import LocalStore


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm([])


@pytest.mark.parametrize("item", ["create.before", "nowhere=kill", "create.before=crash", "commit.before=error", "=@"])
def test_what_is_not_known_is_refused(item: str) -> None:
    with pytest.raises(SettingsError, match=r"TOKENHAUL_FAILPOINTS=.* is not allowed"):
        failpoints.arm([item])


def test_it_is_loud_and_strikes_the_n_th_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(tmp_path)
    failpoints.arm(["create.linked=error@2"])
    assert "will be made to fail on purpose at create.linked" in caplog.text
    assert store.create("a", b"1")
    with pytest.raises(Retry, match=r"failpoint create\.linked"):
        store.create("b", b"1")
    assert not store.create("b", b"2"), "the effect had happened"
    assert store.create("c", b"1")


def test_every_place_is_passed_somewhere_and_none_is_made_up() -> None:
    sources = Path(failpoints.__file__).parent.parent.rglob("*.py")
    passed = {place for path in sources for place in re.findall(r'failpoints\.passing\("(.+?)"\)', path.read_text())}
    assert passed == failpoints.PLACES.keys()
