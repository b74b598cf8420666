"""What is generated from the code is up to date: the README's settings, the JSON Schemas, the golden messages."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.kernel.codec import Decoder
from services.reference import MESSAGES, json_schemas, settings_table

ROOT = Path(__file__).parent.parent.parent


def test_the_readme_lists_every_setting() -> None:
    assert settings_table() in (ROOT / "README.md").read_text(), "run `make docs`"


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
