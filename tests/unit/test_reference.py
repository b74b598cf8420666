"""What is generated from the code is up to date: the README's settings, the JSON Schemas, the golden messages."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from services.kernel.codec import Decoder
from services.reference import MESSAGES, json_schemas, metrics, metrics_page, settings_table

ROOT = Path(__file__).parent.parent.parent


def test_the_readme_lists_every_setting() -> None:
    assert settings_table() in (ROOT / "README.md").read_text(), "run `make docs`"


def test_the_page_of_metrics_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), "run `make docs`"


@pytest.mark.parametrize("service", ["ingest", "generate", "sink"])
def test_every_exported_series_is_on_the_page_under_its_own_name(service: str) -> None:
    """Also those that the libraries add a suffix to, and with base units only."""
    page = metrics_page()
    for family in metrics()[service].registry.collect():
        if family.name.startswith("tokenhaul_"):
            name = {"counter": f"{family.name}_total", "info": f"{family.name}_info"}.get(family.type, family.name)
            assert f"| `{name}` |" in page
            assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|mib|percent)(_|$)", name), name


@pytest.mark.parametrize(("name", "text"), list(json_schemas()), ids=lambda value: value[:20])
def test_the_json_schemas_are_those_of_the_code(name: str, text: str) -> None:
    assert (ROOT / "schemas" / "json" / name).read_text() == text, "run `make docs`"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_old_bytes_still_decode(message: type[msgspec.Struct]) -> None:
    """A change that breaks this would make topics unreadable: add a new version of the message instead."""
    tag = str(message.__struct_config__.tag)
    data = (ROOT / "schemas" / "golden" / f"{tag}.bin").read_bytes()
    expected = (ROOT / "schemas" / "golden" / f"{tag}.json").read_bytes()
    assert msgspec.json.format(msgspec.json.encode(Decoder(message).decode(data))) == expected.strip()


def test_the_tests_that_the_guarantees_name_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    "page", sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]), ids=lambda path: path.name
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
