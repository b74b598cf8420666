"""What is asked again, and what is not asked at all, on the way from a prompt to its outcome."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from schemas.prompts import Prompt
from schemas.sequences import Sequence
from services.generator.attempts import Attempts
from services.generator.engine import Engine
from services.generator.engines import Engines
from services.generator.metrics import GeneratorMetrics
from services.generator.settings import GeneratorSettings
from services.generator.window import Window
from tests.support.http import Answering
from tests.support.stream import make_prompt

A = "http://a:30000"


class Server:
    """Gives all the tokens it is asked for, and never ends by itself."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content)
        self.asked.append(body["sampling_params"])
        count = body["sampling_params"]["max_new_tokens"]
        meta = {
            "id": body["rid"], "finish_reason": {"type": "length", "length": count},
            "prompt_tokens": len(body["input_ids"]), "completion_tokens": count,
        }  # fmt: skip
        return httpx.Response(200, json={"output_ids": [7] * count, "meta_info": meta})


def attempts(server: Server, engines: Engines, **given: Any) -> Attempts:
    settings = GeneratorSettings(engines=[A], **given)
    return Attempts(settings, engines, Answering(server), GeneratorMetrics(), lambda *_: False)


def one_engine() -> Engines:
    engines = Engines()
    engines.all.append(Engine(A, Window(1, 1)))
    engines.all[0].ready = True
    return engines


def prompt(**sampling: Any) -> Prompt:
    made = make_prompt(1, max_new_tokens=4)
    return msgspec.structs.replace(made, sampling={**made.sampling, **sampling})


async def test_a_continuation_owes_only_what_is_missing_of_min_new_tokens() -> None:
    server = Server()
    continuing = attempts(server, one_engine(), truncated="continue", continue_tokens=10)
    outcome = await continuing.outcome(prompt(min_new_tokens=3))
    assert isinstance(outcome, Sequence)
    assert outcome.segments == [4, 4, 2]
    assert [sampling["min_new_tokens"] for sampling in server.asked] == [3, 0, 0], "else it could not end for so long"


@pytest.mark.parametrize("constraint", ["json_schema", "regex", "ebnf", "structural_tag"])
async def test_what_must_keep_to_a_grammar_is_not_continued(constraint: str) -> None:
    server = Server()
    continuing = attempts(server, one_engine(), truncated="continue", continue_tokens=10)
    outcome = await continuing.outcome(prompt(**{constraint: "x"}))
    assert isinstance(outcome, Sequence)
    assert (len(outcome.output_ids), len(server.asked)) == (4, 1), "the engine would begin the grammar anew"
