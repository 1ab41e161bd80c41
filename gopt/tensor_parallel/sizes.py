"""Rules, by name, that divide a dimension among members."""

from __future__ import annotations

from enum import Enum


class Sizes(str, Enum):
    """The rules, as options and reports name them."""

    BALANCED = "balanced"
    """The first members have one element more where it does not come out even."""
    CEIL = "ceil"
    """Every member has ⌈n/N⌉, the last ones what is left."""
    FLOOR_LAST = "floor-last"
    """Every member has ⌊n/N⌋, and the last one what is left as well."""


def part_sizes(length: int, members: int, rule: Sizes, unit: int = 1) -> tuple[int, ...]:
    """Elements of each member, in whole ``unit``s but for a rest that the last member with some has."""
    count, rest = divmod(length, unit)
    sizes = [size * unit for size in _units(count, members, rule)]
    sizes[max((place for place, size in enumerate(sizes) if size), default=0)] += rest
    return tuple(sizes)


def _units(count: int, members: int, rule: Sizes) -> list[int]:
    floor, more = divmod(count, members)
    if rule is Sizes.BALANCED:
        return [floor + (place < more) for place in range(members)]
    if rule is Sizes.FLOOR_LAST:
        return [floor] * (members - 1) + [floor + more]
    most = -(-count // members)
    return [max(min(most, count - most * place), 0) for place in range(members)]
