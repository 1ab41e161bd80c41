"""The names defined in a graph or a body of control flow: unique, in UTF-8, and not reserved by gopt."""

from __future__ import annotations

from gopt import limits
from gopt.errors import InputError
from gopt.ir.external_data import show

RESERVED = "gopt."
"""Prefix of all names that gopt creates."""


def text(name: str) -> str:
    """Return the text; raises InputError unless UTF-8."""
    if not isinstance(name, str):  # what protobuf gives for bytes that are not UTF-8
        raise InputError(f"the name {show(name)} is not UTF-8")
    return name


class SymbolTable:
    """The values defined in a body, each once."""

    def __init__(self, reserved_hint: str | None, *, function: bool = False) -> None:
        self.reserved_hint = reserved_hint
        """Hint of the error for a name with gopt's prefix; None permits such names."""
        self.function = function
        """True in the body of a function, where attributes may refer to the call's attributes."""
        self.defined: dict[str, str] = {"": ""}
        """Every name that is defined, with itself: readers take this object, so that a name is in memory once and is
        hashed once."""

        self.bodies = 0
        """Bodies of control flow in this one."""

    def inner(self) -> SymbolTable:
        """Return the scope of an inner body of control flow."""
        self.bodies += 1
        return SymbolTable(self.reserved_hint, function=self.function)

    def define(self, name: str, what: str) -> None:
        """Add a value; raises InputError where the name is empty, taken, or gopt's own."""
        if name in self.defined:
            raise InputError(f"value {show(name)} is defined twice" if name else f"{what} without a name")
        if (
            name[: len(RESERVED)] == RESERVED or type(name) is not str or len(name) > limits.NAME_LENGTH
        ):  # once per value: a call for each would show
            self.allow(name, "value")
        self.defined[name] = name

    def allow(self, name: str, what: str) -> None:
        """Raise InputError for a name reserved by gopt, or too long."""
        if len(name) > limits.NAME_LENGTH:
            raise InputError(
                f"{what} is named {show(name)}: longer than {limits.NAME_LENGTH} (NAME_LENGTH)",
                limits.hint("NAME_LENGTH", len(name)),
            )
        if text(name).startswith(RESERVED) and self.reserved_hint is not None:
            raise InputError(
                f"{what} {show(name)}: names that begin with {RESERVED!r} are gopt's own", self.reserved_hint
            )
