"""TLS and SASL towards Kafka: from settings to what aiokafka takes, and from a refusal to what people can act on.

There is no setting that switches the check of certificates or host names off.
"""

from __future__ import annotations

import ssl
from typing import Any, Literal, Protocol

from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError

from services.kernel.errors import SettingsError
from services.kernel.settings import Secret

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
_PREFIX = "TOKENHAUL_KAFKA_"
_LOOK_MS = 5000


class SecuritySettings(Protocol):
    """The part of KafkaSettings that matters here."""

    @property
    def security_protocol(self) -> SecurityProtocol: ...
    @property
    def sasl_mechanism(self) -> Mechanism: ...
    @property
    def sasl_username(self) -> str: ...
    @property
    def sasl_password(self) -> Secret: ...
    @property
    def ssl_ca_file(self) -> str: ...
    @property
    def ssl_cert_file(self) -> str: ...
    @property
    def ssl_key_file(self) -> str: ...


def connection(settings: SecuritySettings) -> dict[str, Any]:
    """Arguments of every client of aiokafka. Raises SettingsError for what is missing, unreadable, or would be ignored
    in silence."""
    protocol = settings.security_protocol
    sasl, tls = protocol.startswith("SASL_"), protocol.endswith("SSL")
    problems = []
    for name in ("sasl_username", "sasl_password"):
        if bool(getattr(settings, name)) != sasl:
            problems.append(f"{_PREFIX}{name.upper()} is {'not ' if sasl else ''}set, but the protocol is {protocol}")
    for name in ("ssl_ca_file", "ssl_cert_file", "ssl_key_file"):
        if getattr(settings, name) and not tls:
            problems.append(f"{_PREFIX}{name.upper()} is set, but the protocol is {protocol}: take SSL or SASL_SSL")
    if bool(settings.ssl_cert_file) != bool(settings.ssl_key_file):
        problems.append(f"{_PREFIX}SSL_CERT_FILE and {_PREFIX}SSL_KEY_FILE must be set together")
    if problems:
        raise SettingsError("\n".join(f"{problem} ({_PREFIX}SECURITY_PROTOCOL)" for problem in problems))
    arguments: dict[str, Any] = {"security_protocol": protocol}
    if tls:
        arguments["ssl_context"] = _context(settings)
    if sasl:
        arguments |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_username,
            "sasl_plain_password": settings.sasl_password.reveal(),
        }
    return arguments


def ca_context(variable: str, file: str) -> ssl.SSLContext:
    """A client's context that trusts `file` (PEM), or what the system trusts. Raises SettingsError."""
    try:
        return ssl.create_default_context(cafile=file or None)
    except OSError as error:  # an SSLError is one
        raise SettingsError(f"{variable}={file!r} cannot be used: {error.strerror or error}") from error


def _context(settings: SecuritySettings) -> ssl.SSLContext:
    context = ca_context(f"{_PREFIX}SSL_CA_FILE", settings.ssl_ca_file)
    if settings.ssl_cert_file:
        try:
            context.load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file)
        except OSError as error:
            raise SettingsError(
                f"{_PREFIX}SSL_CERT_FILE={settings.ssl_cert_file!r} and {_PREFIX}SSL_KEY_FILE="
                f"{settings.ssl_key_file!r} cannot be used: {error.strerror or error}"
            ) from error
    return context


async def why_refused(arguments: dict[str, Any]) -> str:
    """What the first broker that takes a connection objects to; empty when security is not the reason."""
    if arguments["security_protocol"] == "PLAINTEXT":
        return ""
    given = {name: value for name, value in arguments.items() if name != "bootstrap_servers"}
    for address in arguments["bootstrap_servers"]:
        host, _, port = address.rpartition(":")
        try:
            (await create_conn(host.strip("[]"), int(port), request_timeout_ms=_LOOK_MS, **given)).close()
        except ssl.SSLError as error:
            return f"TLS: {error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason}"
        except KafkaError as error:
            if "sasl" in repr(error).lower() or "Authentication" in type(error).__name__:
                return f"SASL: {error}"
        except (OSError, TimeoutError):
            continue
    return ""
