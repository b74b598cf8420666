"""Chat templates that print the date of today would make another prompt every day: they get a date that stays."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2

DATE = "strftime_now"
"""The function templates ask for the date, and the key of chat_template_kwargs that says which date it is."""

_HIDDEN = "tokenhaul_date"


def fix_date(templates: Iterable[str]) -> None:
    """Let these templates, wherever transformers renders them in this process, print the date given under DATE.

    Without one it stays today's. transformers lets no function through to a template, so it becomes its own."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # takes a second

    for template in templates:
        if DATE in template:
            _compile_jinja_template(template).globals[DATE] = _strftime


def with_date(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` as a template takes them that was prepared by `fix_date`: DATE holds a date like 2026-07-26.

    Raises ValueError for what is no date."""
    given = dict(kwargs)
    if DATE in given:
        given[_HIDDEN] = datetime.date.fromisoformat(str(given.pop(DATE))).isoformat()
    return given


@jinja2.pass_context
def _strftime(context: jinja2.runtime.Context, format: str) -> str:
    day = context.get(_HIDDEN)
    now = datetime.datetime.now()
    return (datetime.datetime.fromisoformat(day) if day else now).strftime(format)
