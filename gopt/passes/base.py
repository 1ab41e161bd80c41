"""Interface of a pass: a name, a frozen dataclass of options, and a function from program and options to a result."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from gopt.errors import OptionError
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.text.suggestions import did_you_mean

T = TypeVar("T")
_MOST = 1 << 63
"""Exclusive upper bound of numeric options, so that a report can represent them."""


def _never(program: SpmdProgram) -> str:
    return ""


@dataclass(frozen=True)
class Pass:
    """One rewrite.

    ``after``: passes that must run earlier if both are in the pipeline. ``needed``: function from the unchanged program
    to the reason for wrong ranks without this pass, or ''."""

    name: str
    options: type
    apply: Callable[[SpmdProgram, Any], PassResult]
    after: tuple[str, ...] = ()
    needed: Callable[[SpmdProgram], str] = _never
    facts: type | None = None
    """The record of the pass's figures in the report."""
    axis: str = ""
    """The pass has a use on a mesh with this axis alone; '': on any."""

    @property
    def summary(self) -> str:
        """First line of the pass's docstring."""
        return (self.apply.__doc__ or "").strip().splitlines()[0]


def option_table(spec: Pass) -> list[tuple[str, str, str]]:
    """``(name, type, default)`` of every option, for help and docs."""
    hints = typing.get_type_hints(spec.options)
    rows = []
    for field in fields(spec.options):
        default = "required" if field.default is MISSING else _show(field.default)
        rows.append((field.name.replace("_", "-"), _type_name(hints[field.name]), default))
    return rows


def dashed(values: Mapping[str, T]) -> dict[str, T]:
    """The values of fields by the names of options."""
    return {name.replace("_", "-"): value for name, value in values.items()}


def build_options(spec: Pass, texts: Mapping[str, Any]) -> Any:
    """The options object from names and texts (or TOML values); raises OptionError with the known names."""
    hints = typing.get_type_hints(spec.options)
    values = {}
    for key, value in texts.items():
        name = key.replace("-", "_")
        if name not in hints:
            names = [*dashed(hints)]
            hint = did_you_mean(key, names) or f"it takes {', '.join(names) or 'no options'}"
            raise OptionError(f"pass {spec.name} has no option {key!r}", hint)
        values[name] = _convert(spec.name, key, value, hints[name])
    return spec.options(**values)


def show_options(options: Any) -> dict[str, Any]:
    """Options as resolved, for the report."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def _convert(owner: str, key: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None or value == "auto":
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    try:
        if isinstance(hint, type) and issubclass(hint, Enum):
            return hint(type(next(iter(hint)).value)(value))
        if hint is str and isinstance(value, Mapping):  # a table of a configuration file
            return ";".join(f"{name}:{item}" for name, item in value.items())
        if hint is bool:
            return {"true": True, "false": False}[str(value).lower()]
        number = hint(value)
        if hint in (int, float) and not abs(number) < _MOST:  # not a number neither
            raise ValueError
        return number
    except (ValueError, KeyError, TypeError, OverflowError):
        raise OptionError(f"pass {owner}: option {key} cannot be {value!r}", f"it takes {_type_name(hint)}") from None


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join("auto" if arg is type(None) else _type_name(arg) for arg in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(str(item.value) for item in hint)
    return str(getattr(hint, "__name__", hint))


def _show(value: Any) -> str:
    if value is None:
        return "auto"
    return str(value.value) if isinstance(value, Enum) else str(value)
