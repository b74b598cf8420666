"""Chat templates are rendered in a sandbox, which asks at every attribute whether the template may see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_DICT = frozenset(dir(dict))


def quicken(templates: Iterable[str]) -> None:
    """Keep it from finding out again what it knows: deciding is a third of what rendering costs, looking for attributes
    that are not there a tenth. What a template sees and may do stays the same."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    for template in templates:
        environment = _compile_jinja_template(template).environment
        environment.is_safe_attribute = _Remembered(environment)
        environment.getattr = _keys_first(environment)


def _keys_first(environment: Any) -> Callable[[Any, str], Any]:
    """jinja2's Environment.getattr, which tries attributes first. A key of a dict that no dict has as an attribute, as
    a message's role, it would come to in the end."""
    getattr = type(environment).getattr

    def look(obj: Any, name: str) -> Any:
        if type(obj) is dict and name in obj and name not in _DICT:
            return obj[name]
        return getattr(environment, obj, name)

    return look


class _Remembered:
    """jinja2's Environment.is_safe_attribute: what it says depends on the type and the name alone."""

    def __init__(self, environment: Any) -> None:
        self._environment, self._decide = environment, type(environment).is_safe_attribute
        self._known: dict[tuple[type, str], bool] = {}

    def __call__(self, obj: Any, name: str, value: Any) -> bool:
        key = type(obj), name
        safe = self._known.get(key)
        if safe is None:
            safe = self._known[key] = bool(self._decide(self._environment, obj, name, value))
        return safe
