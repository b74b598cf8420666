"""`tokenhaul verify ROOT`: proves from the files alone that a dataset is whole and right, and says what is not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from schemas.control import Dataset
from services.kernel.errors import TokenhaulError
from services.kernel.objects import open_store
from services.kernel.store import Store
from services.sink.audit import Audit
from services.sink.chain import find
from services.sink.report import Report
from services.sink.rerender import Rerender


class NothingToVerify(TokenhaulError):
    """The directory is no dataset, or the tokenizer none."""

    status = 2


def verify(root: Path | str, tokenizer_dir: Path | None = None, *, trust_remote_code: bool = False) -> Report:
    """Look at every file, footer and row of the dataset in `root` (a directory or a URL), or right under it. Raises
    NothingToVerify.

    Partitions one after the other, shards in order, row groups one at a time: memory holds one row group and the ids of
    one partition (18 to 22 bytes each)."""
    store, folder, dataset = _find(str(root))
    rerender = None
    if tokenizer_dir is not None:
        try:
            rerender = Rerender(tokenizer_dir, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise NothingToVerify(f"no tokenizer can be loaded from {tokenizer_dir}: {error}") from error
    return Audit(store, folder, dataset, rerender).run()


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul verify`."""
    parser.add_argument("root", metavar="ROOT", help="a dataset, or where it stands: a directory or s3://bucket/prefix")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="render the stored messages with it and compare the prompt ids"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that comes with the tokenizer"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def command(arguments: argparse.Namespace) -> int:
    """Verify and print; 0 nothing is wrong, 1 something is, 2 there is nothing to verify."""
    try:
        report = verify(arguments.root, arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    except NothingToVerify as error:
        print(f"tokenhaul: {error}", file=sys.stderr)
        return error.status
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if arguments.json else report.text())
    return 0 if report.ok else 1


def _find(root: str) -> tuple[Store, str, Dataset]:
    try:
        store = open_store(root)
        return store, *find(store)
    except TokenhaulError as error:
        raise NothingToVerify(str(error)) from error
