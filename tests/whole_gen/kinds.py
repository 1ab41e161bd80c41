"""The table of structures that a step may hold; each draws its variants. ``python -m whole_gen 1 1000 kinds``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from whole_gen.writer import Writer

Kind = Callable[[Writer], None]
KINDS: dict[str, Kind] = {}


def kind(step: Kind) -> Kind:
    assert step.__name__ not in KINDS, step.__name__
    KINDS[step.__name__.strip("_")] = step
    return step


def load_all() -> dict[str, Kind]:
    """The table with all structures in it: those of every module ``kinds_*``."""
    for path in sorted(Path(__file__).parent.glob("kinds_*.py")):
        importlib.import_module(f"whole_gen.{path.stem}")
    return KINDS


def of_seed(seed: int, samples: int, scale: int, *, servers: bool = False, only: str = "") -> Writer:
    """A step of one structure, drawn; ``servers``: of those that trainers and servers run as ranks do: a trainer keeps
    statistics of its own samples; ``only``: structures, joined by commas."""
    w = Writer(seed, samples, scale)
    table = load_all()
    names = [name for name in sorted(table) if not (servers and table[name].__module__.endswith("kinds_roles"))]
    table[w.pick(*(only.split(",") if only else names))](w)
    return w
