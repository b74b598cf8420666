"""Settings of the generator."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from services.kernel.settings import Secret, Settings

BUDGETS = ("max_output_tokens", "max_rows", "max_hours")
"""Settings that are options of the commands, too: they differ from one start to the next."""


class GeneratorSettings(Settings, frozen=True, kw_only=True):
    """Engines and how they are asked."""

    PREFIX: ClassVar[str] = "TOKENHAUL_GENERATOR_"

    engines: Annotated[
        list[Annotated[str, Meta(pattern=r"^(dns\+)?https?://(?!.*/generate/?$)[^\s@]+$")]],
        Meta(
            min_length=1,
            description="base URLs of SGLang servers or routers; dns+http://name:port is one for each address of name",
            extra={"secret_in": "TOKENHAUL_GENERATOR_API_KEY"},
        ),
    ]
    api_key: Annotated[
        Secret, Meta(description="what engines were started with as --api-key; sent as a bearer token, shown nowhere")
    ] = Secret()
    ca_file: Annotated[
        str, Meta(description="PEM file of who signs the certificates of https engines; empty: the usual authorities")
    ] = ""
    model_path: Annotated[
        str,
        Meta(description="what engines call the dataset's model; empty: the same last part of the path as its label"),
    ] = ""
    router_retries_off: Annotated[
        bool, Meta(description="the routers among the engines run with --disable-retries (required to use one)")
    ] = False
    window: Annotated[
        int, Meta(ge=0, description="requests in flight per engine; 0: follow what the engine says of its load")
    ] = 0
    window_most: Annotated[int, Meta(ge=1, description="no more than this in flight per engine, when following")] = 2048
    attempts: Annotated[
        int, Meta(ge=1, description="attempts on a healthy engine before a prompt fails as retries_exhausted")
    ] = 8
    request_seconds: Annotated[
        float, Meta(gt=0, description="how long a request may take, whatever it asks for (queue and prefill)")
    ] = 600.0
    token_seconds: Annotated[
        float, Meta(gt=0, description="how much longer it may take for each token of max_new_tokens")
    ] = 0.5
    deaths: Annotated[
        int, Meta(ge=1, description="engine deaths with a prompt in flight before it is tried alone, and then refused")
    ] = 2
    truncated: Annotated[
        Literal["keep", "continue", "drop"],
        Meta(description="outputs that reach max_new_tokens: keep them, continue them, or drop them as failures"),
    ] = "keep"
    continue_tokens: Annotated[
        int, Meta(ge=1, description="with truncated=continue: longest output, all continuations together")
    ] = 32768
    logprobs: Annotated[bool, Meta(description="ask for and keep the log probability of every output token")] = False
    max_output_tokens: Annotated[
        int, Meta(ge=0, description="stop the whole group after this many output tokens; 0: no limit")
    ] = 0
    max_rows: Annotated[int, Meta(ge=0, description="stop the whole group after this many sequences; 0: no limit")] = 0
    max_hours: Annotated[float, Meta(ge=0, description="stop the whole group after this time; 0: no limit")] = 0.0
    from_start: Annotated[
        bool,
        Meta(
            description="begin at the first prompt although outcomes exist and the group has no offsets: "
            "everything is generated, and paid for, again"
        ),
    ] = False
