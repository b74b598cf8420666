"""What can go wrong, by what is to be done about it.

TokenhaulError
├── Retry            it may pass: the same thing again, later
│   └── Refused      ... but a store said no: where nothing ever worked, the settings are wrong
├── Stopped          asked to end before the work began: status 0
├── Reject           this record will never pass: it ends as a failure or a dead letter, the others go on
└── Fatal            nothing further can be done right: the process ends with status 3 and says why
    └── SettingsError   ... before it connected to anything, with status 2
"""

from __future__ import annotations


class TokenhaulError(Exception):
    """Base of all errors raised on purpose."""

    status = 1


class Retry(TokenhaulError):
    """It may pass. `cause` is a short, closed name (a metric label); `after` the wait in seconds that was asked for."""

    def __init__(self, cause: str, detail: str, after: float | None = None) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.after = after


class Refused(Retry):
    """The store is there and does not want us (a wrong name, no right, a file where a directory must be). Under a
    service that has worked it is Retry like any other; before, it will not pass."""


class Stopped(TokenhaulError):
    """A stop was asked for while the service still waited for something."""

    status = 0


class Reject(TokenhaulError):
    """A record that will never pass: `reason` is a short, closed name (a metric label), `detail` is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Fatal(TokenhaulError):
    """Going on would break a promise."""

    status = 3


class SettingsError(Fatal):
    """Settings that cannot be used: one line each, naming variable, value and what is allowed."""

    status = 2
