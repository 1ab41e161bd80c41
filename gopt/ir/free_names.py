"""Unused names for values of a model, and unused prefixes of names."""

from __future__ import annotations

from collections.abc import Iterable


def free_prefix(stem: str, reserved: Iterable[str]) -> str:
    """Return the first of ``STEM``, ``STEM2``, ... that begins no name."""
    names, number, prefix = list(reserved), 1, stem
    while any(name.startswith(prefix) for name in names):
        number += 1
        prefix = f"{stem}{number}"
    return prefix


class FreeNames:
    """Gives unused names to values: the requested name, or ``NAME.2``, ``NAME.3``, ...

    ``renamed``: given name -> another, requested name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._taken = set(names)
        self.renamed: dict[str, str] = {}

    def add(self, names: Iterable[str]) -> None:
        """Reserve names."""
        self._taken.update(names)

    def take(self, wished: str) -> str:
        """Return a free name and reserve the name."""
        number, name = 1, wished
        while name in self._taken:
            number += 1
            name = f"{wished}.{number}"
        self._taken.add(name)
        if number > 1:
            self.renamed[name] = wished
        return name

    def prefix(self, stem: str) -> str:
        """Return the first of ``STEM``, ``STEM2``, ... that begins no name."""
        return free_prefix(stem, self._taken)
