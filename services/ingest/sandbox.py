"""Chat templates are rendered in a sandbox, which asks at every attribute whether the template may see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def remember_safe_attributes(templates: Iterable[str]) -> None:
    """Let it decide once for each type and name: the answer depends on nothing else, and deciding is a third of what
    rendering costs."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    for template in templates:
        environment = _compile_jinja_template(template).environment
        environment.is_safe_attribute = _Remembered(environment)


class _Remembered:
    """jinja2's Environment.is_safe_attribute, with a memory."""

    def __init__(self, environment: Any) -> None:
        self._environment, self._decide = environment, type(environment).is_safe_attribute
        self._known: dict[tuple[type, str], bool] = {}

    def __call__(self, obj: Any, name: str, value: Any) -> bool:
        key = type(obj), name
        safe = self._known.get(key)
        if safe is None:
            safe = self._known[key] = bool(self._decide(self._environment, obj, name, value))
        return safe
