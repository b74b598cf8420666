"""`tokenhaul`: one console script for the services, the tools and the laptop.

Services read their settings from the environment alone (README, "Settings"); an argument is what differs from one start
to the next. Rooms are imported when they are asked for: transformers alone takes a second.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from services.generator.settings import BUDGETS, GeneratorSettings
from services.ingest.settings import IngestSettings
from services.kernel import lifecycle
from services.kernel.errors import SettingsError
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.lifecycle import ProcessSettings
from services.kernel.settings import Settings, add_options, given_options, refuse_unknown
from services.operations.settings import StatusSettings
from services.sink.settings import SinkSettings

SETTINGS: tuple[type[Settings], ...] = (
    ProcessSettings,
    KafkaSettings,
    IngestSettings,
    GeneratorSettings,
    SinkSettings,
    StatusSettings,
)
"""All settings there are, in the order people read them."""

_SERVICES = {
    "ingest": ("read the sources, tokenise them, publish prompts", "services.ingest.service"),
    "generate": ("let engines answer the prompts, publish the outcomes", "services.generator.service"),
    "sink": ("write the outcomes to Parquet shards", "services.sink.service"),
}
_TOOLS = {
    "push": ("hand records to an ingest that runs", "services.ingest.push"),
    "run": ("the whole pipeline on this machine, over your own files", "services.local.run"),
    "demo": ("the whole pipeline over the prompts that come with it", "services.local.demo"),
    "check": ("prove that sources, tokenizer and engine fit together; show a prompt of each", "services.ingest.check"),
    "status": ("how far each source is, how busy each engine, what waits", "services.operations.status_command"),
    "dead": ("list, show, replay or drop what failed", "services.operations.dead_command"),
    "config": ("every setting, its value here, and where it comes from", "services.operations.config"),
    "cancel": ("let a source's waiting prompts fail instead of generating them", "services.generator.command"),
    "resume": ("let generators go on that a budget has halted", "services.generator.command"),
    "kafka": ("one Kafka node on this machine, to try the services with", "services.local.kafka_command"),
    "engine": ("a small local engine behind SGLang's /generate", "services.local.engine.command"),
    "verify": ("prove that a dataset's shards are whole and right", "services.sink.verify"),
    "inspect": ("show rows as their tokens", "services.dataset.inspect"),
    "snapshot": ("keep a dataset as it is now under a name", "services.dataset.snapshot"),
    "export": ("write what trainers load, and a card that tells what it is", "services.dataset.export_command"),
    "regenerate": ("ask for rows again, with the next revision", "services.dataset.regenerate"),
    "discard": ("exclude rows from all use, with a reason", "services.dataset.discard"),
    "topics": ("create the topics, or compare them with what they must be", "services.kernel.topics_command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would advise to install PyTorch
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="tokenhaul", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"tokenhaul {version('tokenhaul')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, room) in (_SERVICES | _TOOLS).items():
        how = " Its settings come from the environment: see the README." if name in _SERVICES else ""
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.{how}")
        if name in _SERVICES:
            command.add_argument("--until-idle", action="store_true", help="end when this run's work is done")
            if name == "ingest" and argv[:1] == [name]:
                importlib.import_module("services.ingest.oneoff").configure(command)
            if name == "generate":
                add_options(command, GeneratorSettings, BUDGETS)
        elif argv[:1] == [name]:
            importlib.import_module(room).configure(command)
    arguments = parser.parse_args(argv)
    try:
        refuse_unknown(os.environ, SETTINGS)
    except SettingsError as error:
        print(*(f"tokenhaul: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.status
    if arguments.command == "ingest" and arguments.files:
        oneoff = importlib.import_module("services.ingest.oneoff")
        make = partial(oneoff.make, arguments.files, arguments.max_new_tokens)
        return lifecycle.run(make, oneoff.environment(arguments.files, os.environ), until_idle=True)
    if arguments.command in _SERVICES:
        make = importlib.import_module(_SERVICES[arguments.command][1]).make
        given = given_options(arguments, GeneratorSettings, BUDGETS) if arguments.command == "generate" else {}
        return lifecycle.run(make, os.environ | given, until_idle=arguments.until_idle)
    return int(importlib.import_module(_TOOLS[arguments.command][1]).command(arguments))


if __name__ == "__main__":
    sys.exit(main())
