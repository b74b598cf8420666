"""Writes what is generated from the code: the README's table of settings, the JSON Schemas of the wire.

python -m services.reference README.md schemas/json          # `make docs`; a test holds both against the code
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from schemas import control, cursors, dead, prompts, sequences
from services.cli import SETTINGS
from services.kernel.settings import describe

MESSAGES = (
    prompts.Prompt,
    sequences.Sequence,
    sequences.Failure,
    dead.DeadLetter,
    cursors.Cursor,
    control.Dataset,
    control.Idle,
)
_TABLE = re.compile(r"(?<=<!-- settings: made by `make docs` -->\n).*?(?=<!-- end of settings -->)", re.DOTALL)


def settings_table() -> str:
    """All settings as Markdown."""
    lines = ["| variable | takes | default | what it is |", "|---|---|---|---|"]
    for cls in SETTINGS:
        for setting in describe(cls):
            default = "**required**" if setting.default is None else f"`{setting.default}`" if setting.default else ""
            allowed = setting.allowed.replace("|", "\\|")
            lines.append(f"| `{setting.variable}` | {allowed} | {default} | {setting.description} |")
    return "\n".join(lines) + "\n"


def with_settings(readme: str) -> str:
    """`readme` with its table of settings as it must be."""
    table = settings_table()
    return _TABLE.sub(lambda _: table, readme)


def json_schemas() -> Iterator[tuple[str, str]]:
    """(file name, text) for every message. On the wire it is msgpack, where bytes are bytes and no base64."""
    for message in MESSAGES:
        schema = msgspec.json.encode(msgspec.json.schema(message))
        yield f"{message.__struct_config__.tag}.schema.json", msgspec.json.format(schema).decode() + "\n"


def main(readme: Path, schemas: Path) -> None:
    """Write both."""
    readme.write_text(with_settings(readme.read_text()))
    schemas.mkdir(exist_ok=True)
    for name, text in json_schemas():
        (schemas / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
