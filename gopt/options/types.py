"""Types of options and arguments, from annotations: whether a value fits, and the name of a type."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from gopt.errors import GoptError, KeywordError, OptionError
from gopt.options.keyword_texts import keyword_text
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean, nearest

P = ParamSpec("P")
R = TypeVar("R")


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, also of numpy, but no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_digits(text: str) -> bool:
    """Return whether a text is a whole number from 0 in decimal digits, and not endless."""
    return text.isascii() and text.isdigit() and len(text) <= 100


_PLAIN: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    int: (is_whole, "a whole number"),
    float: (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    bool: (lambda value: isinstance(value, bool), "True or False"),
    str: (lambda value: isinstance(value, str), "a text"),
    types.NoneType: (lambda value: value is None, "None"),
    os.PathLike: (lambda value: isinstance(value, os.PathLike), "a path"),
    Callable: (callable, "a function"),
}
"""Type -> whether a value is of it, and what to call it."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function refusing arguments of wrong types and unknown keywords, by name; raises OptionError. Further keywords
    (``**changes``) belong to an option record."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        hints, keywords = _hints(function), _keywords(function)
        try:
            for name in named:
                if name not in keywords:
                    raise unknown(name, keywords, f"gopt.{function.__name__}: ", _of_record(hints.get("options")))
            for name, value in signature.bind(*args, **named).arguments.items():
                if name in hints and not fits(value, hints[name]):
                    raise wrong(f"gopt.{function.__name__}: {name}", value, hints[name])
            return function(*args, **named)
        except GoptError as error:
            error.spell(functools.partial(keyword_text, known={*keywords, *_of_record(hints.get("options"))}))
            raise

    return call


def hinted(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose refusals have hints in tracebacks, in words of Python."""

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        try:
            return function(*args, **named)
        except GoptError as error:
            error.spell(keyword_text)
            raise

    return call


def unknown(name: str, names: Sequence[str], where: str = "", fields: Mapping[str, str] = {}) -> KeywordError:
    """The refusal of an unknown keyword, with the nearest keyword, or all. ``fields``: of the record with options ->
    the way to write an option."""
    field = nearest(name, fields)
    near = did_you_mean(name, names) or (f"write {fields[field]}" if field is not None else None)
    hint = near or _by_words(name, names) or f"there are {', '.join(names)}"
    return KeywordError(f"{where}no option {name!r}", hint)


def _by_words(name: str, names: Sequence[str]) -> str | None:
    """The known name near a word of ``name``: ``zero_stgae`` means ``stage``."""
    return next((near for word in name.split("_") if (near := did_you_mean(word, names))), None)


def wrong(what: str, value: object, hint: Any) -> OptionError:
    """The refusal of a value not of the type ``hint``."""
    return OptionError(f"{what} cannot be {show(value)}", f"it takes {called(hint)}")


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type. A number of numpy is a number, a list is a tuple of any length."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if kind in _PLAIN:
        return _PLAIN[kind][0](value)
    if kind is tuple and parts[1:] != (...,):
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(fits, value, parts))
    if kind in (tuple, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes) and _all_fit(value, parts[0])
    if kind is Mapping:
        return isinstance(value, Mapping) and _all_fit(value, parts[0]) and _all_fit(value.values(), parts[1])
    if hasattr(kind, "__array__"):
        plain = isinstance(value, Sequence | Real) and not isinstance(value, str | bytes)
        return plain or hasattr(value, "__array__")
    return kind is Any or isinstance(value, kind)


def called(hint: Any) -> str:
    """A type in words: ``int | None`` -> ``a whole number or None``."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(called, parts)))
    if kind in _PLAIN:
        return _PLAIN[kind][1]
    if kind is tuple and parts[1:] != (...,):
        return f"a tuple of {', '.join(map(called, parts))}"
    if kind in (tuple, Sequence):
        return f"a list, each item {called(parts[0])}"
    if kind is Mapping:
        return f"a mapping, each key {called(parts[0])}, each value {called(parts[1])}"
    if hasattr(kind, "__array__"):
        return "an array"
    if kind is Any:
        return "anything"
    if issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    return f"a {kind.__qualname__}"


def _all_fit(values: Any, hint: Any) -> bool:
    return all(fits(value, hint) for value in values)


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> type; without unannotated parameters and further keywords."""
    return {name: hint for name, hint in _annotations(function).items() if typing.get_origin(hint) is not typing.Unpack}


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of all keywords: the parameters, and the keys of ``**changes: Unpack[SomeTypedDict]``."""
    names: list[str] = []
    for name in inspect.signature(function).parameters:
        hint = _annotations(function).get(name)
        further = typing.get_origin(hint) is typing.Unpack
        names += typing.get_args(hint)[0].__annotations__ if further else [name]
    return tuple(names)


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    written = {param.name: param.annotation for param in parameters if param.annotation is not param.empty}
    named = types.SimpleNamespace(__annotations__=written)
    return typing.get_type_hints(named, vars(inspect.getmodule(function)))


def _of_record(hint: Any) -> dict[str, str]:
    """Field of an option record -> the way to write the field as an argument; empty for other types."""
    return {
        field.name: f"options={kind.__name__}({field.name}=...)"
        for kind in typing.get_args(hint) or (hint,)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }
