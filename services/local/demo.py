"""`tokenhaul demo`: `tokenhaul run` over the prompts that come with it, or over yours with the demo's limits."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from services.local import run

_MAX_NEW_TOKENS = 128


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul demo`: those of run, none required."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="prompts of your own instead of the demo's")
    parser.add_argument(
        "--max-new-tokens", type=int, default=_MAX_NEW_TOKENS, metavar="N",
        help="longest answer, in tokens (default %(default)s)",
    )  # fmt: skip
    run.add_places(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 only when every promise held."""
    if arguments.files:
        return run.command(arguments)
    return run.run(arguments, lambda folder: _demo_sources(folder, arguments.max_new_tokens))


def _demo_sources(folder: Path, max_new_tokens: int) -> Path:
    """The demo's sources file, its files by their full paths."""
    data = run.DATA / "demo"
    sources = yaml.safe_load((data / "sources.yaml").read_text())["sources"]
    for source in sources:
        source["files"] = [str(data / name) for name in source["files"]]
        source["max_new_tokens"] = max_new_tokens
    target = folder / "sources.yaml"
    target.write_text(yaml.safe_dump({"sources": sources}, sort_keys=False))
    return target
