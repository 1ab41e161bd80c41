"""Options that are given for tables by name or by pattern."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from gopt.errors import OptionError
from gopt.sanitize import show


def chosen(given: Mapping[str, str], names: Collection[str], what: str = "table") -> dict[str, str]:
    """Return the option of each name: the first entry counts that is the name, or a pattern (``*``, ``?``, ``[...]``)
    that matches it. Names without an option are left out.

    Raises OptionError for an entry that matches no name, or has no effect. ``what``: the kind of the names.
    """
    found: dict[str, str] = {}
    for pattern, text in given.items():
        fitting = fits(pattern, names)
        if not fitting:
            close = get_close_matches(pattern, sorted(names), 1) or sorted(names)[:5]
            hint = f"there are {', '.join(map(show, close))}" if close else "there is none"
            raise OptionError(f"{show(pattern)} matches no {what}", hint)
        if not any(name not in found for name in fitting):
            raise OptionError(
                f"the entry {show(pattern)} for tables has no effect: earlier entries match all that it matches",
                "put it before them, or leave it out",
            )
        for name in fitting:
            found.setdefault(name, text)
    return found


def fits(pattern: str, names: Collection[str]) -> list[str]:
    """Return the name that a pattern is, or those that it matches."""
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
