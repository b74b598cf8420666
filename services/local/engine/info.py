"""The routes that tell about the engine: health, model, load, tokenizer, metrics.

Keys are those of SGLang 0.5.23, as far as this engine has something true to say; SGLang's other 500 server
arguments, its memory and prefill statistics are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from services.local.engine.answer import WEIGHT_VERSION
from services.local.engine.errors import Refusal
from services.local.engine.jobs import Jobs, Model
from services.local.engine.metrics import EngineMetrics


class InfoRoutes:
    """What is asked with GET, and /v1/tokenize."""

    def __init__(
        self,
        model: Model,
        jobs: Jobs,
        metrics: EngineMetrics,
        is_ready: Callable[[], bool],
    ) -> None:
        self._model = model
        self._jobs = jobs
        self._metrics = metrics
        self._is_ready = is_ready
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """All of them; model and server information have two names each."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/ping", self.ping),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/models", self.models),
            web.get("/v1/loads", self.loads),
            web.get("/metrics", self.metrics),
            web.post("/v1/tokenize", self.tokenize),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """200 when the model answers; 503 while it loads, while the engine drains, and when it is broken."""
        healthy = self._is_ready() and await self._model.healthy()
        return web.Response(status=200 if healthy else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """200 or 503, at once."""
        return web.Response(status=200 if self._is_ready() else 503)

    async def ping(self, _: web.Request) -> web.Response:
        """200 whatever the state."""
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        """Which model is served."""
        name = self._model.facts.model
        return web.json_response(
            {
                "model_path": name,
                "served_model_name": name,
                "tokenizer_path": name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": WEIGHT_VERSION,
                "reasoning_parser": None,
                "tool_call_parser": None,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        """What the server can do, its version, and whether it is ready."""
        facts = self._model.facts
        state = {"last_gen_throughput": self._metrics.throughput.rate()}
        return web.json_response(
            {
                "model_path": facts.model,
                "served_model_name": facts.model,
                "tokenizer_path": facts.model,
                "version": facts.version,
                "context_length": facts.context_length,
                "max_running_requests": self._jobs.slots,
                "max_queued_requests": self._jobs.max_queued,
                "max_total_num_tokens": self._total_tokens,
                "max_req_input_len": facts.context_length - 1,
                "skip_tokenizer_init": False,
                "allow_auto_truncate": False,
                "weight_version": WEIGHT_VERSION,
                "device": "cpu",
                "enable_metrics": True,
                "incremental_streaming_output": False,
                "dp_size": 1,
                "tp_size": 1,
                "status": "ready" if self._is_ready() else "not ready",
                "internal_states": [state],
            }
        )

    async def models(self, _: web.Request) -> web.Response:
        """The served model with its context length, in OpenAI's shape."""
        facts = self._model.facts
        model = {
            "id": facts.model,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": facts.model,
            "parent": None,
            "max_model_len": facts.context_length,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def loads(self, _: web.Request) -> web.Response:
        """How busy the engine is; one entry, as there is one data-parallel rank."""
        jobs, used = self._jobs, self._jobs.used_tokens
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(jobs.running),
            "num_waiting_reqs": len(jobs.waiting),
            "num_used_tokens": used,
            "num_total_tokens": used + sum(len(job.generation.prompt_ids) for job in jobs.waiting),
            "max_total_num_tokens": self._total_tokens,
            "max_running_requests": jobs.slots,
            "token_usage": round(used / self._total_tokens, 4),
            "gen_throughput": round(self._metrics.throughput.rate(), 2),
            "cache_hit_rate": round(self._metrics.cache_hit_rate, 4),
            "utilization": round(len(jobs.running) / jobs.slots, 4),
            "queues": {"waiting": len(jobs.waiting), "grammar": 0, "paused": 0, "retracted": 0},
        }
        return web.json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": self._model.facts.version,
                "accelerator": None,
                "num_accelerators": 1,
                "loads": [load],
            }
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text, format 0.0.4."""
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /v1/tokenize: the ids of `prompt`, a text or a list of texts."""
        try:
            prompt = msgspec.json.decode(await request.read(), type=_TokenizeRequest).prompt
        except msgspec.DecodeError as error:
            raise Refusal.flat(400, "Bad Request", str(error)) from None
        answer: dict[str, Any]
        if isinstance(prompt, str):
            tokens = self._model.encode(prompt)
            answer = {"tokens": tokens, "count": len(tokens)}
        else:
            rows = [self._model.encode(text) for text in prompt]
            answer = {"tokens": rows, "count": [len(row) for row in rows]}
        return web.json_response({**answer, "max_model_len": self._model.facts.context_length})

    @property
    def _total_tokens(self) -> int:
        return self._model.facts.context_length * self._jobs.slots


class _TokenizeRequest(msgspec.Struct):
    prompt: str | list[str]
