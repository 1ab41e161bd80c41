"""Option records as keywords of a verb: the record that is meant, or OptionError for what is no option or no value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, TypeVar

from gopt.errors import OptionError
from gopt.suggestions import did_you_mean

R = TypeVar("R")


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, of numpy too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_whole, "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "FilePath": (lambda value: isinstance(value, str | os.PathLike), "a path"),
    "None": (lambda value: value is None, "None"),
}
"""Type of a field as it is written -> whether a value is of it, and what to call it."""


def changed(options: R | None, kind: type[R], changes: Mapping[str, Any]) -> R:
    """``options``, or those of a ``kind`` that says nothing, with ``changes``.

    Raises OptionError for a record of another kind, and for a change that is no field, with the nearest that is.
    """
    assert is_dataclass(kind)
    if options is None:
        options = kind()
    if not isinstance(options, kind):
        hint = f"give a gopt.{kind.__name__}, or its fields as keywords"
        raise OptionError(f"options cannot be of type {type(options).__name__}", hint)
    known = [each.name for each in fields(kind)]
    for name in changes:
        if name not in known:
            near = did_you_mean(name, known) or _by_words(name, known) or f"there are {', '.join(known)}"
            raise OptionError(f"no option {name!r}", near)
    return replace(options, **changes)


def check_types(record: Any) -> None:
    """Raise OptionError for a field of numbers, texts, paths or truth values that holds something else.

    Whole numbers of other libraries, such as numpy's, become Python's. A field of another type is not looked at.
    """
    for each in fields(record):
        words = str(each.type).split(" | ")
        if not all(word in _KINDS for word in words):
            continue
        value = getattr(record, each.name)
        if not any(_KINDS[word][0](value) for word in words):
            expected = " or ".join(_KINDS[word][1] for word in words)
            raise OptionError(f"option {each.name} cannot be {value!r}", f"it takes {expected}")
        if isinstance(value, Integral) and not isinstance(value, bool | int):
            object.__setattr__(record, each.name, int(value))


def _by_words(name: str, known: list[str]) -> str | None:
    """The known name that is near one word of ``name``: ``zero_stgae`` means ``stage``."""
    return next((found for word in name.split("_") if (found := did_you_mean(word, known))), None)
