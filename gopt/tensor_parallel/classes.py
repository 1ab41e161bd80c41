"""Classes of ranks: ranks of a class hold parts of equal sizes, and share a program and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from gopt.records.placements import PARTS, Sharding


def classes(shardings: Iterable[Sharding], axes: Mapping[str, int]) -> list[tuple[dict[str, int], ...]]:
    """Return the coordinates along ``axes`` (name -> members), by class; the class with the largest parts is first."""
    rules = list(dict.fromkeys(_sizes(sharding) for sharding in shardings))
    ranks: dict[tuple[int, ...], list[dict[str, int]]] = {}
    for ranks_at in product(*map(range, axes.values())):
        at = dict(zip(axes, ranks_at))
        sizes_here = tuple(sizes[at[axis]] for rule in rules for axis, sizes in rule)
        ranks.setdefault(sizes_here, []).append(at)
    return [tuple(ranks[key]) for key in sorted(ranks, key=sum, reverse=True)]


def _sizes(sharding: Sharding) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((axis, placement.sizes) for axis, placement in sharding.by_axis if isinstance(placement, PARTS))
