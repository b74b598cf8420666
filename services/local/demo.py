"""`tokenhaul demo`: `tokenhaul run` over the prompts that come with it, or over yours with the demo's limits."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.local import run

_MAX_NEW_TOKENS = 128


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul demo`: those of run, none required."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="prompts of your own instead of the demo's")
    parser.add_argument(
        "--max-new-tokens", type=run.positive, default=_MAX_NEW_TOKENS, metavar="N",
        help="longest answer, in tokens (default %(default)s)",
    )  # fmt: skip
    run.add_places(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 only when every promise held."""
    if arguments.files:
        return run.command(arguments)
    return run.run(arguments, lambda: _demo_sources(arguments.max_new_tokens))


def _demo_sources(max_new_tokens: int) -> run.Sources:
    """The sources that come with the package."""
    return [source | {"max_new_tokens": max_new_tokens} for source in run.declared(run.DATA / "demo" / "sources.yaml")]
