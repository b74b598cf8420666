"""Settings: what a wrong one says."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pytest
from msgspec import Meta

from services.generator.settings import GeneratorSettings
from services.ingest.settings import IngestSettings
from services.kernel.errors import SettingsError
from services.kernel.kafka_settings import KafkaSettings
from services.kernel.masking import masked
from services.kernel.settings import Settings, describe, load, refuse_unknown


class Example(Settings, frozen=True, kw_only=True):
    PREFIX: ClassVar[str] = "TOKENHAUL_EXAMPLE_"

    engines: Annotated[list[str], Meta(min_length=1, description="base URLs")]
    window: Annotated[int, Meta(ge=1, le=4096, description="in flight")] = 64
    mode: Annotated[Literal["keep", "drop"], Meta(description="what to do")] = "keep"
    strict: Annotated[bool, Meta(description="be strict")] = False
    limit: Annotated[int | None, Meta(description="no limit when unset")] = None


GOOD = {"TOKENHAUL_EXAMPLE_ENGINES": "http://a, http://b,"}


def test_values_are_read_from_the_environment() -> None:
    read = load(Example, GOOD | {"TOKENHAUL_EXAMPLE_WINDOW": "8", "TOKENHAUL_EXAMPLE_STRICT": "true", "PATH": "/bin"})
    assert read == Example(engines=["http://a", "http://b"], window=8, strict=True)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("WINDOW", "many", "an integer >= 1 and <= 4096"),
        ("WINDOW", "0", "an integer >= 1 and <= 4096"),
        ("MODE", "throw", "keep | drop"),
        ("STRICT", "maybe", "true | false"),
        ("ENGINES", ",", "a comma-separated list"),
        ("LIMIT", "x", "an integer"),
    ],
)
def test_a_wrong_one_names_variable_value_and_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(Example, GOOD | {f"TOKENHAUL_EXAMPLE_{variable}": value})
    assert str(refused.value) == f"TOKENHAUL_EXAMPLE_{variable}={value!r} is not allowed: it takes {allowed}"


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        load(Example, {"TOKENHAUL_EXAMPLE_MODE": "x"})
    assert [line.split()[0] for line in str(refused.value).splitlines()] == [
        "TOKENHAUL_EXAMPLE_MODE='x'",
        "TOKENHAUL_EXAMPLE_ENGINES",
    ]


@pytest.mark.parametrize(
    ("cls", "name", "value", "shown", "place"),
    [
        (GeneratorSettings, "ENGINES", "http://user:pw@host", "http://***@host", "TOKENHAUL_GENERATOR_API_KEY"),
        (
            GeneratorSettings,
            "ENGINES",
            "http://a, dns+http://pw@b:1",
            "http://a, dns+http://***@b:1",
            "GENERATOR_API_KEY",
        ),
        (GeneratorSettings, "ENGINES", "http://user:p,w@host", "http://***@host", "TOKENHAUL_GENERATOR_API_KEY"),
        (IngestSettings, "ENGINE", "http://user:pw@host", "http://***@host", "TOKENHAUL_INGEST_ENGINE_API_KEY"),
        (IngestSettings, "ROOTS", "/data,s3://key:p/w@bucket/x", "/data,s3://***@bucket/x", "AWS_SECRET_ACCESS_KEY"),
        (KafkaSettings, "BOOTSTRAP", "user:pw@host:9092", "***@host:9092", "TOKENHAUL_KAFKA_SASL_PASSWORD"),
    ],
)
def test_a_url_with_a_password_is_refused_without_it(
    cls: type[Settings], name: str, value: str, shown: str, place: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(cls, {cls.PREFIX + name: value})
    told = next(line for line in str(refused.value).splitlines() if f"{cls.PREFIX}{name}=" in line)
    assert told.startswith(f"{cls.PREFIX}{name}={shown!r} has a user or a password in it: ")
    assert place in told


def test_any_refused_text_is_shown_without_a_password() -> None:
    with pytest.raises(SettingsError, match=r"TOKENHAUL_EXAMPLE_WINDOW='http://\*\*\*@host' is not allowed"):
        load(Example, GOOD | {"TOKENHAUL_EXAMPLE_WINDOW": "http://user:pw@host"})


@pytest.mark.parametrize("text", ["http://a:1,http://b:2/x", "s3://bucket/a@b", "/data/a:b@c", "a:1,b:2", "8", "x@y"])
def test_what_has_no_password_is_shown_as_it_is(text: str) -> None:
    assert masked(text) == text


def test_a_misspelt_variable_is_refused_but_not_what_kubernetes_adds() -> None:
    links = {"TOKENHAUL_INGEST_SERVICE_HOST": "10.0.0.1", "TOKENHAUL_INGEST_PORT_8080_TCP_ADDR": "10.0.0.1"}
    refuse_unknown(GOOD | links, [Example])
    with pytest.raises(SettingsError, match="TOKENHAUL_EXAMPLE_WINDOWS is not a setting"):
        refuse_unknown(GOOD | {"TOKENHAUL_EXAMPLE_WINDOWS": "8"}, [Example])


def test_describe_tells_everything_a_table_needs() -> None:
    rows = {row.variable: row for row in describe(Example)}
    assert rows["TOKENHAUL_EXAMPLE_ENGINES"].default is None
    assert rows["TOKENHAUL_EXAMPLE_WINDOW"].default == "64"
    assert rows["TOKENHAUL_EXAMPLE_LIMIT"].default == ""
    assert rows["TOKENHAUL_EXAMPLE_MODE"].description == "what to do"
