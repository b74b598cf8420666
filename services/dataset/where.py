"""`--where`: a condition on the columns of a row, small enough to be read at a glance.

    finish_reason = length
    source = chats and repetition >= 0.5
    engine_version = "0.5.23" and generated_at >= 2026-11-30T08:00 and generated_at < 2026-11-30T09:30
    weight_version in (v1, v2)
    reasoning_end is null

Terms are joined by `and`. A value is read as the column's type; times are UTC. As in SQL, a missing value (null)
satisfies nothing but `is null`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from services.kernel.errors import SettingsError
from services.sink.rows import SCHEMA

COLUMNS = tuple(field.name for field in SCHEMA if not pa.types.is_list(field.type))
"""What can be asked for: every column that holds one value."""

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal, "==": pc.equal, "!=": pc.not_equal,
    "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip
_TOKEN = re.compile(r"""\s*(?:(==|!=|<=|>=|[=<>(),])|"([^"]*)"|'([^']*)'|([^\s=<>!(),"']+))""")
_INT64 = range(-(2**63), 2**63)
_ORDERED = ("<", "<=", ">", ">=")


class Term(msgspec.Struct, frozen=True):
    """One comparison: `operator` is one of = == != < <= > >=, in, is null, is not null."""

    column: str
    operator: str
    values: list[Any]


class Where(msgspec.Struct, frozen=True):
    """A condition, and the text it was read from."""

    text: str
    terms: list[Term]

    @property
    def columns(self) -> list[str]:
        """What `matches` needs."""
        return list(dict.fromkeys(term.column for term in self.terms))

    def matches(self, table: pa.Table) -> NDArray[np.bool_]:
        """Which rows satisfy it: shape (rows,)."""
        keep = np.ones(len(table), np.bool_)
        for term in self.terms:
            keep &= np.asarray(pc.fill_null(_evaluate(term, table.column(term.column)), False).to_numpy())
        return keep


def parse(text: str) -> Where:
    """Read a condition. Raises SettingsError that says what was expected where."""
    words = _Words(text)
    terms = [_term(words)]
    while not words.at_end:
        words.take("and")
        terms.append(_term(words))
    return Where(text, terms)


def _term(words: _Words) -> Term:
    column = words.next("a column")
    if column not in COLUMNS:
        raise words.error(f"{column!r} is no column; columns are {', '.join(COLUMNS)}")
    operator = words.next("an operator").lower()
    if operator == "is":
        negated = words.peek() == "not" and bool(words.next())
        words.take("null")
        return Term(column, "is not null" if negated else "is null", [])
    if operator == "in":
        words.take("(")
        values = [_value(words, column)]
        while words.peek() == ",":
            words.next()
            values.append(_value(words, column))
        words.take(")")
        return Term(column, "in", values)
    if operator not in _COMPARE:
        raise words.error(f"{operator!r} is no operator; operators are {', '.join(_COMPARE)}, in, is null, is not null")
    if operator in _ORDERED and pa.types.is_boolean(SCHEMA.field(column).type):
        raise words.error(f"{column} is true or false: it has no order")
    return Term(column, operator, [_value(words, column)])


def _value(words: _Words, column: str) -> Any:
    kind, text = SCHEMA.field(column).type, words.next("a value")
    try:
        if pa.types.is_string(kind):
            return text
        if pa.types.is_integer(kind):
            return _INT64[_INT64.index(int(text))]
        if pa.types.is_floating(kind):
            return float(text)
        if pa.types.is_boolean(kind):
            return {"true": True, "false": False}[text.lower()]
        moment = datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, KeyError):
        wanted = {"double": "a number", "float": "a number", "bool": "true or false"}.get(str(kind))
        wanted = wanted or ("an integer" if pa.types.is_integer(kind) else "a time like 2026-11-30T08:00")
        raise words.error(f"{column} is compared with {wanted}, not with {text!r}") from None


def _evaluate(term: Term, column: pa.ChunkedArray[Any]) -> Any:
    if term.operator == "is null":
        return pc.is_null(column)
    if term.operator == "is not null":
        return pc.is_valid(column)
    operator = "=" if term.operator == "in" else term.operator
    # Integers are wider than the column: no value is cut. A float is what it would be in the column: 0.9 is 0.9.
    kind = None if pa.types.is_integer(column.type) else column.type
    found = [_COMPARE[operator](column, pa.scalar(value, kind)) for value in term.values]
    return functools.reduce(pc.or_, found)


class _Words:
    """The words of a condition, taken one after the other."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._words: list[str] = []
        while self._at < len(text.rstrip()):
            match = _TOKEN.match(text, self._at)
            if not match:
                raise self.error(f"cannot be read from {text[self._at :].strip()!r} on")
            self._words.append(next(group for group in match.groups() if group is not None))
            self._at = match.end()
        self._words.reverse()

    @property
    def at_end(self) -> bool:
        return not self._words

    def peek(self) -> str:
        """The next word, or nothing."""
        return self._words[-1].lower() if self._words else ""

    def next(self, wanted: str = "") -> str:
        if not self._words:
            raise self.error(f"ends where {wanted} is expected")
        return self._words.pop()

    def take(self, word: str) -> None:
        if (found := self.next(repr(word))).lower() != word:
            raise self.error(f"has {found!r} where {word!r} is expected")

    def error(self, what: str) -> SettingsError:
        return SettingsError(f"--where {self._text!r}: {what}")
