"""Options for tables by name or by pattern."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from gopt.errors import OptionError
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean


def chosen(texts: Mapping[str, str], names: Collection[str], what: str = "table") -> dict[str, str]:
    """Return the option of each name: the first entry counts that is the name, or a pattern (``*``, ``?``, ``[...]``)
    that matches it. Names without an option are left out.

    Raises OptionError for an entry that matches no name, or has no effect. ``what``: the kind of the names.
    """
    fits_of: dict[str, str] = {}
    for pattern, text in texts.items():
        fitting = fits(pattern, names)
        if not fitting:
            listed = f"there are {', '.join(map(show, sorted(names)[:5]))}" if names else f"there is no {what}"
            raise OptionError(f"{show(pattern)} matches no {what}", did_you_mean(pattern, sorted(names)) or listed)
        if not any(name not in fits_of for name in fitting):
            raise OptionError(
                f"the entry {show(pattern)} for tables has no effect: earlier entries match all that it matches",
                "put it before them, or leave it out",
            )
        for name in fitting:
            fits_of.setdefault(name, text)
    return fits_of


def fits(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names matched by a pattern or name."""
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
