"""What an engine's answer means for a request: an answer, another attempt, or a refusal."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from schemas.sequences import FailureReason
from services.generator import sglang
from services.generator.sglang import Aborted, Answer, EngineBusy, Request, WorkerLost
from services.kernel.errors import Fatal, Reject, Retry
from tests.contract.recordings import load
from tests.support.http import Answering

REQUEST = Request("r", [1, 2, 3], {"max_new_tokens": 8})


async def ask(response: httpx.Response) -> Answer:
    """What `generate` makes of `response`; the request must be as SGLang wants it."""

    def engine(request: httpx.Request) -> httpx.Response:
        assert (request.method, str(request.url)) == ("POST", "http://engine/generate")
        assert msgspec.json.decode(request.content) == {
            "rid": "r",
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 8},
        }
        return response

    return await sglang.generate(Answering(engine), "http://engine", REQUEST, 5.0)


def recorded(case: str) -> httpx.Response:
    response = load(case)["response"]
    body = response["body"]
    content = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    return httpx.Response(response["status"], content=content)


@pytest.mark.parametrize("case", ["01-greedy-stop", "03-length", "05-stop-string", "37c-max-new-over-kv-pool"])
async def test_recorded_answers_are_read(case: str) -> None:
    body = load(case)["response"]["body"]
    answer = await ask(recorded(case))
    assert answer.output_ids == body["output_ids"]
    assert answer.meta_info.completion_tokens == len(body["output_ids"])


@pytest.mark.parametrize(
    ("response", "kind", "cause", "after"),
    [
        (recorded("34-q-full"), EngineBusy, "http_503", None),
        (httpx.Response(429, headers={"Retry-After": "17"}), EngineBusy, "http_429", 17.0),
        (httpx.Response(503, headers={"Retry-After": "9" * 400}), EngineBusy, "http_503", 300.0),
        (httpx.Response(503, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), EngineBusy, "http_503", None),
        (httpx.Response(401), EngineBusy, "http_401", None),
        (httpx.Response(408), Retry, "http_408", None),
        (httpx.Response(500, text="Internal Server Error", headers={"Retry-After": "3"}), Retry, "http_500", 3.0),
        (httpx.Response(502, text="<html>bad gateway</html>"), Retry, "http_502", None),
        (recorded("45-all-dead-0"), Retry, "worker_down", None),
        (httpx.Response(404, json={"detail": "Not Found"}), EngineBusy, "http_404", None),
        (httpx.Response(302, headers={"Location": "https://login"}), EngineBusy, "http_302", None),
        (recorded("45c-all-dead-after-health-check"), EngineBusy, "http_503", None),
        (recorded("34-q-queued"), Aborted, "abort", None),
        (recorded("14c-aborted-nonstream"), Aborted, "abort", None),
        (httpx.Response(200, text='{"output_ids": [1, 2'), Retry, "not_json", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_can_pass_is_a_retry(
    response: httpx.Response, kind: type[Retry], cause: str, after: float | None
) -> None:
    with pytest.raises(Retry) as retry:
        await ask(response)
    assert (type(retry.value), retry.value.cause, retry.value.after) == (kind, cause, after)


async def test_a_worker_that_dies_late_may_have_died_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_DYING_SECONDS", 0.0)
    with pytest.raises(WorkerLost):
        await ask(recorded("45-all-dead-0"))


async def test_an_abort_tells_how_many_tokens_were_for_nothing() -> None:
    with pytest.raises(Aborted) as aborted:
        await ask(recorded("14c-aborted-nonstream"))
    assert aborted.value.tokens == len(load("14c-aborted-nonstream")["response"]["body"]["output_ids"])


@pytest.mark.parametrize(
    ("response", "reason", "shown"),
    [
        (recorded("13n-input-too-long"), FailureReason.ENGINE_REJECTED, "longer than the model's context length"),
        (recorded("13l-input-ids-strings"), FailureReason.ENGINE_REJECTED, "answered 400"),
        (recorded("13w-sampling-params-list-mismatch"), None, "Internal Server Error"),
        (httpx.Response(422, text="ids outside i32"), FailureReason.ENGINE_REJECTED, "422: ids outside i32"),
        (httpx.Response(200, json=[1, 2]), FailureReason.BAD_ANSWER, "http://engine"),
    ],
    ids=["object", "flat", "plain text", "router", "no answer of /generate"],
)
async def test_what_never_passes_is_refused_with_the_body(
    response: httpx.Response, reason: FailureReason | None, shown: str
) -> None:
    with pytest.raises(Reject if reason else Retry, match=shown) as refused:
        await ask(response)
    assert getattr(refused.value, "reason", None) == reason


async def test_without_output_ids_nothing_can_be_done() -> None:
    body = {"text": "hi", "meta_info": load("01-greedy-stop")["response"]["body"]["meta_info"]}
    with pytest.raises(Fatal, match="without output_ids"):
        await ask(httpx.Response(200, json=body))
