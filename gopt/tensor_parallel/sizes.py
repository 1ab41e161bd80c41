"""Rules, by name, for dividing a dimension among members."""

from __future__ import annotations

from enum import Enum


class Sizes(str, Enum):
    """Names of the rules, as options and reports write them."""

    BALANCED = "balanced"
    """The first members have one element more where the length does not divide."""
    CEIL = "ceil"
    """Every member has ⌈n/N⌉ elements; the last ones have the rest."""
    FLOOR_LAST = "floor-last"
    """Every member has ⌊n/N⌋ elements; the last one also has the rest."""


def part_sizes(length: int, members: int, rule: Sizes, unit: int = 1) -> tuple[int, ...]:
    """Return the elements of each member: multiples of ``unit``, except for the last nonempty member."""
    count, rest = divmod(length, unit)
    sizes = [size * unit for size in _units(count, members, rule)]
    sizes[max((index for index, size in enumerate(sizes) if size), default=0)] += rest
    return tuple(sizes)


def _units(count: int, members: int, rule: Sizes) -> list[int]:
    floor, more = divmod(count, members)
    if rule is Sizes.BALANCED:
        return [floor + (index < more) for index in range(members)]
    if rule is Sizes.FLOOR_LAST:
        return [floor] * (members - 1) + [floor + more]
    most = -(-count // members)
    return [max(min(most, count - most * index), 0) for index in range(members)]
