"""A URL can carry a user and a password. None of ours may; whoever prints what was configured prints it without."""

from __future__ import annotations

import re

# Passwords hold what no URL may (an S3 secret has slashes, others commas), so that whatever stands before the last @
# of an item is hidden. An @ behind a host is part of a path and stays; a host's port looks like a user and may go.
_USER = re.compile(
    r"(^\s*|,\s*)(?:([\w.+-]+://)(?=[^/?#]*[:@])|(?=[^/?#:]*:(?!//)))(?:(?!,\s*[\w.+-]+://).)*@", re.DOTALL | re.ASCII
)


def masked(text: str) -> str:
    """`text` (a URL, a root, a list of them, anything else) with *** for a user and a password in it."""
    return _USER.sub(lambda match: f"{match[1]}{match[2] or ''}***@", text)
