"""The table of kinds: functions that write a step of one structure and draw its variants with ``w.pick``."""

from __future__ import annotations

from collections.abc import Callable

from whole_gen.writer import Writer

Kind = Callable[[Writer], None]
KINDS: dict[str, Kind] = {}


def kind(step: Kind) -> Kind:
    KINDS[step.__name__.strip("_")] = step
    return step


def load_all() -> dict[str, Kind]:
    """The table with all kinds in it."""
    from whole_gen import kinds_reduction

    assert all((kinds_reduction,))
    return KINDS
