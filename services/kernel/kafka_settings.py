"""Where Kafka is and how it is spoken to."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from services.kernel.security import Mechanism, SecurityProtocol
from services.kernel.settings import Secret, Settings


class KafkaSettings(Settings, frozen=True, kw_only=True):
    """Where Kafka is, and this process's place in it."""

    PREFIX: ClassVar[str] = "TOKENHAUL_KAFKA_"

    bootstrap: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^\s/]+:\d{1,5}$")]],
        Meta(
            min_length=1,
            description="brokers to start from, as host:port",
            extra={"secret_in": "TOKENHAUL_KAFKA_SASL_USERNAME with TOKENHAUL_KAFKA_SASL_PASSWORD"},
        ),
    ]
    prefix: Annotated[
        str, Meta(pattern=r"^[a-zA-Z0-9._-]+$", description="what the names of topics and groups begin with")
    ] = "tokenhaul"
    instance: Annotated[
        str,
        Meta(description="static group member id (a StatefulSet pod's name): its partitions wait for it to return"),
    ] = ""
    session_timeout_seconds: Annotated[
        float, Meta(ge=6, le=1800, description="a silent member loses its partitions after this")
    ] = 30.0
    security_protocol: Annotated[SecurityProtocol, Meta(description="as Kafka's own clients name it")] = "PLAINTEXT"
    sasl_mechanism: Annotated[Mechanism, Meta(description="with SASL_*: how the password is shown to the broker")] = (
        "SCRAM-SHA-512"
    )
    sasl_username: Annotated[str, Meta(description="with SASL_*: who we are")] = ""
    sasl_password: Annotated[Secret, Meta(description="with SASL_*: never shown anywhere")] = Secret()
    ssl_ca_file: Annotated[
        str, Meta(description="with SSL or SASL_SSL: PEM file of who signs the brokers; empty: the system's")
    ] = ""
    ssl_cert_file: Annotated[str, Meta(description="with SSL or SASL_SSL: PEM file of our certificate, if any")] = ""
    ssl_key_file: Annotated[str, Meta(description="PEM file of the key of ssl_cert_file")] = ""
