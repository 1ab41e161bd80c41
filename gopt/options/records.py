"""Option records as keywords of a verb: the record, or OptionError for an unknown option or a wrong value."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from numbers import Integral
from typing import Any, TypeVar

from gopt.errors import GoptError, OptionError
from gopt.options.keyword_texts import keyword_text
from gopt.options.types import fits, unknown, wrong
from gopt.text.sanitize import show

R = TypeVar("R")


def changed(options: R | None, kind: type[R], changes: Mapping[str, Any]) -> R:
    """``options``, or the defaults of a ``kind``, with ``changes``. Raises OptionError for a record of another kind,
    and for an unknown field, naming the nearest."""
    assert is_dataclass(kind)
    if options is None:
        options = kind()
    if not isinstance(options, kind):
        hint = f"give a gopt.{kind.__name__}, or its fields as keywords"
        raise OptionError(f"options cannot be of type {type(options).__name__}", hint)
    names = [field.name for field in fields(kind)]
    for name in changes:
        if name not in names:
            raise unknown(name, names)
    return replace(options, **changes)


def spelled(kind: type[R]) -> type[R]:
    """A record with refusals naming its fields, and not options of commands, for readers of Python."""
    make = kind.__init__

    @functools.wraps(make)
    def named(self: Any, *args: Any, **changes: Any) -> None:
        try:
            make(self, *args, **changes)
        except GoptError as error:
            error.spell(functools.partial(keyword_text, known=changes))
            raise

    setattr(kind, "__init__", named)  # noqa: B010 - mypy takes no assignment to a method
    return kind


def check_types(record: Any, *, but: Collection[str] = ()) -> None:
    """Raise OptionError for a field of a wrong type, unless checked by the record (``but``). Whole numbers of other
    libraries, such as numpy's, become Python's; the text of an enum becomes the member."""
    hints = _hints(type(record))
    for field in fields(record):
        if field.name in but:
            continue
        value, hint = getattr(record, field.name), hints[field.name]
        member = _member(value, hint)
        if member is not None:
            object.__setattr__(record, field.name, member)
        elif not fits(value, hint):
            raise wrong(f"option {field.name}", value, hint)
        elif isinstance(value, Integral) and not isinstance(value, bool | int):
            object.__setattr__(record, field.name, int(value))


def check_least(record: Any, **least: int) -> None:
    """Raise OptionError for a field below the minimum; None is allowed."""
    for name, low in least.items():
        value = getattr(record, name)
        if value is not None and value < low:
            raise OptionError(f"option {name} cannot be {value}", f"give at least {low}")


def check_words(record: Any, **words: Collection[str]) -> None:
    """Raise OptionError for a field holding another word; None is allowed."""
    for name, names in words.items():
        value = getattr(record, name)
        if value is not None and value not in names:
            raise OptionError(f"option {name} cannot be {show(value)}", f"it takes {' or '.join(names)}")


def check_deadline(seconds: float | None) -> None:
    """Raise OptionError for anything but a time to wait, in seconds, or None."""
    if seconds is not None and not 0 < seconds <= LONGEST:  # NaN neither
        raise OptionError(f"option deadline cannot be {seconds}", f"give seconds above 0, at most {LONGEST:g}")


LONGEST = 1e9
"""Seconds that the system's clocks can wait."""
_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Kind of record -> field -> its type."""


def _member(value: Any, hint: Any) -> Enum | None:
    """The member of an enum named by a text, if the type is the enum, or the enum and None."""
    for kind in typing.get_args(hint) or (hint,):
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
            return next((item for item in kind if item.value == value), None)
    return None
