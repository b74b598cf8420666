"""Eight rendered prompts with their ids: whoever serves the model must make the same ids of the same texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import aiohttp

from schemas.control import Probe, Probes
from services.ingest.prompts import PromptMaker
from services.kernel import tokenize
from services.kernel.errors import Fatal, Reject
from services.kernel.settings import Secret

log = logging.getLogger("tokenhaul.ingest")

_SECONDS = 60.0
# What tokenizers differ in: scripts, digits, white space, code, emoji, control tokens (written by the template).
_TEXTS = (
    "What is the capital of France? Answer in one word.",
    "def f(x):\n\treturn x ** 2  # 1234567890\n\n\n    print(f(3.14159))",
    "  Leading,   inner and trailing   spaces \t\n \n",
    "小明有十二个苹果。请问他还剩几个?",
    "Größe, naïveté, Ünïcödé; русский текст; العربية; हिन्दी; 한국어",
    "🙂👩\u200d👩\u200d👧 — “quotes” … ½ ≤ ∑ €",
    '{"name": "look_up", "arguments": {"ids": [1, 22, 333, 4444]}}',
    "<html>&nbsp;</html> [INST] ### ``` $x_{1}^{2}$ \\frac{a}{b}",
)


def make(makers: Iterable[PromptMaker]) -> Probes:
    """The probes of a tokenizer, rendered as the first of `makers` asks. Raises Fatal for no maker.

    Of a slow tokenizer only texts that plain transformers encodes alike, because that is what servers do."""
    maker = next(iter(makers), None)
    if maker is None:
        raise Fatal("no source, so there is no prompt to probe engines with")
    tokenizer, found = maker.tokenizer, []
    for text in _TEXTS:
        try:
            rendered = tokenizer.render([{"role": "user", "content": text}], None, maker.request.chat_template_kwargs)
        except Reject:
            continue  # a template that cannot do with a user's turn alone was refused before
        ids = tokenizer.ids(rendered)
        if tokenizer.is_fast or tokenizer.plain_text(rendered) == ids:
            found.append(Probe(rendered, ids))
    return Probes(tokenizer_fingerprint=maker.request.tokenizer_fingerprint, probes=found)


async def prove_engine(url: str, api_key: Secret, probes: Probes) -> None:
    """Raises Fatal when the engine at `url` makes other ids, or does not answer: it was asked for."""
    if not probes.probes:
        log.warning("no text is encoded alike by this tokenizer and by servers: %s is not compared", url)
        return
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key.reveal()}"
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_SECONDS)) as http,
            http.post(url.rstrip("/") + tokenize.PATH, data=tokenize.question(probes)) as answer,
        ):
            different = tokenize.disagreement(answer.status, await answer.read(), probes)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Fatal(f"TOKENHAUL_INGEST_ENGINE {url} does not say how it tokenizes: {error!r}") from error
    if different:
        raise Fatal(f"TOKENHAUL_INGEST_ENGINE {url}: {different}. Does it serve the model the prompts are for?")
    log.info("the tokenizer of %s agrees", url, extra={"action": "preflight"})
