"""What takes long: memory over a million records, faults in all services, and the first run on a fresh machine.

python -m tests.bench.endurance memory|faults|first-run [records]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.bench.qwen3 import ROOT
from tests.bench.table import Line, show
from tests.chaos.load import Load

RECORDS = 1_000_000
_FIRST_RUN_SECONDS = 180
_FAULTS = ["--seed", "7", "--minutes", "2"]


def measure_long() -> list[Line]:
    """About an hour, most of it for the million records."""
    return [*first_run(), *faults(), *memory(RECORDS)]


def memory(records: int) -> list[Line]:
    """Each service while `records` go through all of them (`make chaos-load`): its size at the end beside the most it
    had in the first half, without what ids may have added."""
    with tempfile.TemporaryDirectory() as name:
        load = Load(Path(name) / "load")
        if problems := load.run(records, burst=0):
            raise RuntimeError("\n".join(problems))
    return [
        Line(
            name=f"{each.service}, resident after {records:,} records", value=each.late / 2**20, unit="MiB",
            reference=each.early / 2**20, reference_name="in the first half", at_most=1.1, bounds="ratio",
        )
        for each in load.memory
    ]  # fmt: skip


def faults() -> list[Line]:
    """`make chaos-short`, and what its judge finds wrong."""
    command = [sys.executable, "-m", "tests.chaos.run", *_FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    found = run.stdout.partition("FAILED")[2].splitlines()[1:]
    if run.returncode and not found:
        raise RuntimeError(f"the faults were not judged:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    name = "records lost, doubled or paid for without a reason, after 2 minutes of faults"
    return [Line(name=name, value=len(found), unit="records", at_most=0)]


def first_run() -> list[Line]:
    """From a clone to the first shards: `make demo` with nothing in any cache."""
    with tempfile.TemporaryDirectory() as name:
        clone, home = Path(name) / "tokenhaul", Path(name) / "home"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        home.mkdir()
        kept = {"PATH", "LANG", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "HTTPS_PROXY", "NO_PROXY"}
        environ = {variable: value for variable, value in os.environ.items() if variable in kept}
        began = time.monotonic()
        command = ["make", "demo", f"PYTHON={sys.base_prefix}/bin/python3", "MAX_NEW_TOKENS=32"]
        run = subprocess.Popen(
            command, cwd=clone, env=environ | {"HOME": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = run.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGTERM)  # make alone would leave the demo behind
        seconds = time.monotonic() - began
        if run.returncode or not list(clone.glob("out/**/*.parquet")):
            raise RuntimeError(f"make demo in a fresh clone:\n{output[-2000:]}")
    return [Line(name="clone to first shards, nothing cached", value=seconds, unit="s", at_most=_FIRST_RUN_SECONDS)]


if __name__ == "__main__":
    records = int(sys.argv[2]) if len(sys.argv) > 2 else RECORDS
    what = {"memory": lambda: memory(records), "faults": faults, "first-run": first_run}
    show(what[sys.argv[1]](), sys.argv[1])
