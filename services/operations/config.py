"""`tokenhaul config`: every setting there is, its value here, and where it comes from. Connects to nothing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from services.kernel.errors import SettingsError
from services.kernel.masking import masked
from services.kernel.settings import Settings, describe, load


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as it stands: `origin` is environment, default or missing; `problem` is empty if it is right."""

    variable: str
    value: str | None
    origin: str
    description: str
    problem: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul config`."""
    parser.add_argument("--json", action="store_true", help="as JSON, for tools")
    parser.add_argument("--set", action="store_true", dest="only_set", help="only what the environment sets")


def command(arguments: argparse.Namespace) -> int:
    """Show them. 2 when one that is set is wrong, as the services would end."""
    from services.cli import SETTINGS  # the command line knows all of them, and imports us

    shown = [one for one in settings(SETTINGS, os.environ) if one.origin == "environment" or not arguments.only_set]
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(shown), indent=2))
    else:
        _print(shown)
    return SettingsError.status if any(one.problem for one in shown) else 0


def settings(known: tuple[type[Settings], ...], environ: Mapping[str, str]) -> list[Shown]:
    """Every setting of `known` as `environ` has it. Secrets are shown as ***."""
    found = []
    for cls in known:
        for setting in describe(cls):
            text = environ.get(setting.variable, "").strip()
            origin = "environment" if text else "missing" if setting.default is None else "default"
            secret = setting.allowed == "a secret"
            found.append(
                Shown(
                    variable=setting.variable,
                    value=("***" if secret else masked(text)) if text else setting.default,
                    origin=origin,
                    description=setting.description,
                    problem=_problem(cls, setting.variable, text) if text else "",
                )
            )
    return found


def _problem(cls: type[Settings], variable: str, text: str) -> str:
    """What is wrong with this one alone; what others lack is their own."""
    try:
        load(cls, {variable: text})
    except SettingsError as error:
        return next((line for line in str(error).splitlines() if line.startswith(f"{variable}=")), "")
    return ""


def _print(shown: list[Shown]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name in ("value", "from", "what it is"):
        table.add_column(name, overflow="fold")
    for one in shown:
        style = "red" if one.problem else "bold" if one.origin == "environment" else ""
        value = "" if one.value is None else one.value
        table.add_row(
            one.variable,
            value,
            one.origin,
            one.problem.removeprefix(f"{one.variable}=") or one.description,
            style=style,
        )
    Console().print(table)
