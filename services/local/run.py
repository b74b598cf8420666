"""`tokenhaul run FILE...`: the whole pipeline on one machine, over your own prompts, from start to end.

What is not given is started here: Kafka, the engine. The three services are separate processes configured by their
environment alone, exactly as in production; one that is killed is started again.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from services.generator.settings import BUDGETS, GeneratorSettings
from services.ingest import oneoff
from services.kernel import logs
from services.kernel.errors import SettingsError, TokenhaulError
from services.kernel.masking import masked
from services.kernel.settings import add_options, given_options, load
from services.local import pipeline, report
from services.local.pipeline import Plan
from services.sink.chain import DATASET_FILE

Sources = list[dict[str, Any]]
"""What a sources file declares."""

DATA = Path(__file__).parent / "data"
LOCAL_TOKENIZER = DATA / "smollm2"
LOCAL_MODEL = "SmolLM2-135M-Instruct"


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tokenhaul run`."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="prompts, one source each (.jsonl, .json, .parquet, also .gz, .zst); or one .yaml that declares sources "
        "(docs/sources.md)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="longest answer, in tokens; required, except with a .yaml"
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
    add_options(parser, GeneratorSettings, BUDGETS)
    parser.add_argument("--resume", action="store_true", help="go on where one of these limits has stopped a run")
    parser.add_argument(
        "--kafka",
        metavar="HOST:PORT",
        help="a Kafka of your own, with TLS and SASL as TOKENHAUL_KAFKA_* say (default: one node is started)",
    )
    parser.add_argument("--out", metavar="DIR", help="where the dataset goes (default: out/<time>)")
    parser.add_argument("--partitions", type=positive, default=4, metavar="N", help="partitions (default %(default)s)")


def command(arguments: argparse.Namespace) -> int:
    """Run the pipeline; 0 only when every promise held."""
    return run(arguments, lambda: _sources(arguments.files, arguments.max_new_tokens))


def positive(text: str) -> int:
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def run(arguments: argparse.Namespace, sources: Callable[[], Sources]) -> int:
    """Run the pipeline over `sources`, and report; the exit status."""
    logs.configure("human", "info")
    signal.signal(signal.SIGTERM, _interrupt)
    out = ""
    try:
        with _plan(arguments, sources()) as plan:
            out = str(plan.out)
            result = pipeline.run(plan)
            return report.show(plan, result)
    except TokenhaulError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        how = f"The same command goes on with --out {shlex.quote(out)}" if out else "Nothing was begun"
        print(f"\ntokenhaul: interrupted; nothing of it runs any more. {how}", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _plan(arguments: argparse.Namespace, sources: Sources) -> Iterator[Plan]:
    """What is to be run, checked before anything is made or started, and locked. Raises SettingsError."""
    if arguments.engine and arguments.tokenizer is None:
        raise SettingsError("--engine needs --tokenizer DIR: the prompts must be tokenised as that engine's model does")
    if arguments.tokenizer and not arguments.engine:
        raise SettingsError("--tokenizer needs --engine URL: the local engine has a model and a tokenizer of its own")
    limits = given_options(arguments, GeneratorSettings, BUDGETS)
    load(GeneratorSettings, {"TOKENHAUL_GENERATOR_ENGINES": "http://any", **limits})  # refused here, if at all
    for engine in arguments.engine:
        try:
            load(GeneratorSettings, {"TOKENHAUL_GENERATOR_ENGINES": engine})
        except SettingsError as error:
            raise SettingsError(
                f"--engine {masked(engine)!r} is no base URL of an SGLang server, as http://host:port "
                "(a key goes into TOKENHAUL_GENERATOR_API_KEY)"
            ) from error
    tokenizer = (arguments.tokenizer or LOCAL_TOKENIZER).resolve()
    for name in ("config.json", "tokenizer_config.json"):
        if not (tokenizer / name).is_file():
            raise SettingsError(f"--tokenizer {tokenizer} has no {name}: give the model's own directory")
    if arguments.out == "":
        raise SettingsError("--out is empty")
    out = Path(arguments.out or Path("out") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")).resolve()
    if any((parent / DATASET_FILE).exists() for parent in (out, *out.parents)):
        raise SettingsError(f"--out {out} is within a dataset: give the directory that dataset was made in, or another")
    folder = out / ".run"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", out):
        target = folder / "sources.yaml"
        target.write_text(yaml.safe_dump({"sources": sources}, sort_keys=False, allow_unicode=True))
        yield Plan(
            out=out,
            dataset=re.sub(r"[^a-zA-Z0-9_-]+", "-", out.name).strip("-") or "dataset",
            model=arguments.model or (tokenizer.name if arguments.tokenizer else LOCAL_MODEL),
            tokenizer=tokenizer,
            engines=arguments.engine,
            kafka=arguments.kafka,
            partitions=arguments.partitions,
            sources=target,
            limits=limits,
            resume=arguments.resume,
        )


@contextmanager
def _locked(file: Path, out: Path) -> Iterator[None]:
    """One run at a time: two would share a Kafka and fence each other. The system lets go of it for who is killed."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(f"another run works in --out {out}") from error
        yield


def _sources(files: list[Path], max_new_tokens: int | None) -> Sources:
    """One source for each of `files`, or those that the one YAML file declares. Raises SettingsError."""
    if oneoff.is_declaration(files):
        return declared(files[0])
    return oneoff.of_files(files, max_new_tokens)


def declared(file: Path) -> Sources:
    """The sources of a YAML file, their files as seen from where it stands. Ingest checks all the rest."""
    try:
        read = yaml.safe_load(file.read_text())
        sources: Sources = [dict(source) for source in read["sources"]]
        for source in sources:
            source["files"] = [
                name if "://" in name else str(file.resolve().parent / name) for name in source.get("files", ())
            ]
            if excluded := source.get("exclude"):
                names = [excluded] if isinstance(excluded, str) else excluded
                source["exclude"] = [str(file.resolve().parent / name) for name in names]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{file} declares no sources: {error!r} (docs/formats.md)") from error
    return sources
