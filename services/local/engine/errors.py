"""Answers of the engine other than 200, in the three body shapes recorded from SGLang 0.5.23.

Refusal
└── Poison    a real SGLang server would die of this request
"""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """Status and body of an answer that refuses a request: programs read the status, people the body."""

    def __init__(self, status: int, body: dict[str, Any], message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.message = message

    @classmethod
    def value(cls, message: str) -> Refusal:
        """A value that is not allowed: 400, error object. A stream gets 200 and an error event instead."""
        return cls(400, {"error": {"message": message}}, message)

    @classmethod
    def contract(cls, message: str) -> Refusal:
        """A name or type that sampling_params does not know: 400, error string."""
        return cls(400, {"error": message}, message)

    @classmethod
    def flat(cls, status: int, kind: str, message: str) -> Refusal:
        """A body that is no request (400), or an engine that cannot take one now (503): flat object."""
        body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        return cls(status, body, message)

    @classmethod
    def malformed(cls, *findings: dict[str, Any]) -> Refusal:
        """The flat 400 of SGLang's request parser, one line per finding."""
        title = f"{len(findings)} validation error{'s' if len(findings) > 1 else ''}:"
        return cls.flat(400, "Bad Request", "\n".join([title, *(f"  {finding}" for finding in findings)]))

    @classmethod
    def queue_full(cls) -> Refusal:
        """503: as many requests wait as are allowed to."""
        return cls.flat(503, "503", "The request queue is full.")


class Poison(Refusal):
    """A request that kills a real SGLang server, together with everything it is working on."""
