"""Settings come from the environment alone, are read in one place and refused before anything connects.

A room declares a frozen Struct with a `PREFIX`; a field `window` under the prefix TOKENHAUL_GENERATOR_ is the variable
TOKENHAUL_GENERATOR_WINDOW. Bounds and descriptions stand in `Annotated[..., msgspec.Meta(...)]`, from which
the messages and the README's table are made. A URL that needs a secret names in `extra={"secret_in": ...}` the variable
that takes it: one with a user or a password inside is refused, whatever its pattern.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from services.kernel.errors import SettingsError
from services.kernel.masking import masked

# Kubernetes puts variables of this form into every pod for a Service called tokenhaul-...
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP).*)?)$")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all settings. Fields without a default are required."""

    PREFIX: ClassVar[str] = "TOKENHAUL_"


class Secret:
    """A value nobody is shown: neither in logs nor in errors, reprs or tables of settings."""

    __slots__ = ("_value",)

    def __init__(self, value: str = "") -> None:
        self._value = value

    def reveal(self) -> str:
        """The value, for the one place that sends it."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "***" if self._value else ""


class Setting(msgspec.Struct, frozen=True):
    """One variable, as shown to people."""

    variable: str
    allowed: str
    default: str | None
    description: str


S = TypeVar("S", bound=Settings)


def load(cls: type[S], environ: Mapping[str, str]) -> S:
    """The settings in `environ`. Raises SettingsError with one line for each wrong or missing variable."""
    values, problems = {}, []
    for name, hint in _hints(cls).items():
        variable = cls.PREFIX + name.upper()
        text = environ.get(variable, "").strip()
        if text and masked(text) != text and (place := _secret_in(hint)):
            problems.append(
                f"{variable}={masked(text)!r} has a user or a password in it: {place} is the place for them"
            )
        elif text:
            try:
                values[name] = _parse(text, hint)
            except msgspec.ValidationError:
                problems.append(f"{variable}={masked(text)!r} is not allowed: it takes {_allowed(hint)}")
    missing = [setting for setting in describe(cls) if setting.default is None]
    problems += [
        f"{setting.variable} is not set: {setting.description} (takes {setting.allowed})"
        for setting in missing
        if not environ.get(setting.variable, "").strip()
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    return cls(**values)


def describe(cls: type[Settings]) -> list[Setting]:
    """Every variable of `cls`, in order of declaration."""
    defaults = {field.name: field for field in msgspec.structs.fields(cls)}
    return [
        Setting(
            variable=cls.PREFIX + name.upper(),
            allowed=_allowed(hint),
            default=None if defaults[name].required else _show(defaults[name]),
            description=_meta(hint).description or "",
        )
        for name, hint in _hints(cls).items()
    ]


def add_options(parser: argparse.ArgumentParser, cls: type[Settings], names: Iterable[str]) -> None:
    """Options of a command for some settings of `cls`: --max-rows stands for the variable that ends in MAX_ROWS."""
    described = dict(zip(cls.__struct_fields__, describe(cls), strict=True))
    for name in names:
        setting = described[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="N", help=f"{setting.description} ({setting.variable})"
        )


def given_options(arguments: argparse.Namespace, cls: type[Settings], names: Iterable[str]) -> dict[str, str]:
    """The variables that the options given stand for."""
    given = {cls.PREFIX + name.upper(): getattr(arguments, name) for name in names}
    return {variable: text for variable, text in given.items() if text is not None}


def refuse_unknown(environ: Mapping[str, str], known: Iterable[type[Settings]]) -> None:
    """A misspelt variable would be a default in disguise: raise SettingsError naming it."""
    names = {setting.variable for cls in known for setting in describe(cls)}
    unknown = sorted(name for name in environ if name.startswith("TOKENHAUL_") and not _SERVICE_LINK.search(name))
    problems = [f"{name} is not a setting of tokenhaul" for name in unknown if name not in names]
    if problems:
        raise SettingsError("\n".join(problems))


def _hints(cls: type[Settings]) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field: hints[field] for field in cls.__struct_fields__}


def _parse(text: str, hint: Any) -> Any:
    if _bare(hint) is Secret:
        return Secret(text)
    if get_origin(_bare(hint)) is list:
        return msgspec.convert([item.strip() for item in text.split(",") if item.strip()], hint, strict=False)
    return msgspec.convert(text, hint, strict=False)


def _bare(hint: Any) -> Any:
    """The type without Annotated and without `| None`."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return _bare(next(part for part in get_args(hint) if part is not type(None)))
    return hint


def _meta(hint: Any) -> msgspec.Meta:
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, msgspec.Meta)), msgspec.Meta())


def _secret_in(hint: Any) -> str:
    """The variable for what would be a secret in this one; empty where no URL is expected."""
    return str((_meta(hint).extra or {}).get("secret_in", ""))


def _allowed(hint: Any) -> str:
    bare, meta = _bare(hint), _meta(hint)
    if get_origin(bare) is Literal:
        return " | ".join(get_args(bare))
    if get_origin(bare) is list:
        item = _meta(get_args(bare)[0]).pattern
        return f"a comma-separated list of items like {item}" if item else "a comma-separated list"
    if bare is bool:
        return "true | false"
    if bare is Secret:
        return "a secret"
    if bare not in (int, float):
        return f"text like {meta.pattern}" if meta.pattern else "text"
    bounds = [
        f"{sign} {bound}"
        for sign, bound in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        if bound is not None
    ]
    kind = "an integer" if bare is int else "a number"
    return f"{kind} {' and '.join(bounds)}" if bounds else kind


def _show(field: Any) -> str:
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
