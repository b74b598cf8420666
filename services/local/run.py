"""`tokenhaul run FILE...`: the whole pipeline on one machine, over your own prompts, from start to end.

What is not given is started here: Kafka, the engine. The three services are separate processes configured by their
environment alone, exactly as in production; one that is killed is started again.
"""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import sys
from pathlib import Path
from types import FrameType

import yaml

from services.kernel import logs
from services.kernel.errors import SettingsError, TokenhaulError
from services.local import pipeline, report
from services.local.pipeline import Plan

DATA = Path(__file__).parent / "data"
LOCAL_TOKENIZER = DATA / "smollm2"
LOCAL_MODEL = "SmolLM2-135M-Instruct"


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul run`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="prompts as JSON lines, one source each")
    parser.add_argument(
        "--max-new-tokens", type=int, required=True, metavar="N", help="longest answer, in tokens (all sources)"
    )
    add_places(parser)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where things are; what is not given is started locally."""
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an SGLang server (repeat for more); needs --tokenizer",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="tokenizer files, config.json and generation_config.json of the model",
    )
    parser.add_argument("--model", metavar="LABEL", help="label of the model in the dataset (default: name of DIR)")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a Kafka of your own (default: one node is started)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the dataset goes (default: out/<time>)")
    parser.add_argument("--partitions", type=int, default=4, metavar="N", help="partitions (default %(default)s)")


def command(arguments: argparse.Namespace) -> int:
    """Run the pipeline; 0 only when every promise held."""
    return run(arguments, lambda out: _sources(arguments.files, arguments.max_new_tokens, out))


def run(arguments: argparse.Namespace, sources_in: pipeline.WriteSources) -> int:
    """Run the pipeline over the sources file that `sources_in` writes, and report; the exit status."""
    logs.configure("human", "info")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        plan = _plan(arguments, sources_in)
        result = pipeline.run(plan)
        return report.show(plan, result)
    except TokenhaulError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("\ntokenhaul: interrupted; nothing of it runs any more", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _plan(arguments: argparse.Namespace, sources_in: pipeline.WriteSources) -> Plan:
    """What is to be run, checked before anything starts. Raises SettingsError."""
    if arguments.engine and arguments.tokenizer is None:
        raise SettingsError("--engine needs --tokenizer DIR: the prompts must be tokenised as that engine's model does")
    tokenizer = (arguments.tokenizer or LOCAL_TOKENIZER).resolve()
    for name in ("config.json", "tokenizer_config.json"):
        if not (tokenizer / name).is_file():
            raise SettingsError(f"--tokenizer {tokenizer} has no {name}: give the model's own directory")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = (arguments.out or Path("out") / now).resolve()
    (out / ".run").mkdir(parents=True, exist_ok=True)
    label = arguments.model or (tokenizer.name if arguments.tokenizer else LOCAL_MODEL)
    return Plan(
        out=out,
        dataset=re.sub(r"[^a-zA-Z0-9_-]+", "-", out.name).strip("-") or "dataset",
        model=label,
        tokenizer=tokenizer,
        engines=arguments.engine,
        kafka=arguments.kafka,
        partitions=arguments.partitions,
        sources=sources_in(out / ".run"),
    )


def _sources(files: list[Path], max_new_tokens: int, folder: Path) -> Path:
    """A sources file with one source for each of `files`."""
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise SettingsError(f"no such file: {', '.join(missing)}")
    sources = [
        {"name": name, "files": [str(file.resolve())], "max_new_tokens": max_new_tokens}
        for name, file in zip(_names(files), files, strict=True)
    ]
    target = folder / "sources.yaml"
    target.write_text(yaml.safe_dump({"sources": sources}, sort_keys=False))
    return target


def _names(files: list[Path]) -> list[str]:
    """A name for each source: the file's, with a number behind where it would stand twice."""
    names: list[str] = []
    for file in files:
        stem = re.sub(r"[^a-zA-Z0-9_-]+", "-", file.stem)
        taken = sum(re.fullmatch(rf"{re.escape(stem)}(-\d+)?", name) is not None for name in names)
        names.append(f"{stem}-{taken + 1}" if taken else stem)
    return names
