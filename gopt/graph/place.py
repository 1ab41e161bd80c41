"""Placement: on which members of the sharding group a node of the rank-independent graph exists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Everywhere:
    """On every rank."""

    def covers(self, member: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Owner:
    """On one member of the sharding group."""

    member: int

    def covers(self, member: int) -> bool:
        return member == self.member


@dataclass(frozen=True, slots=True)
class Span:
    """On the members whose part of a bucket meets the elements ``[start, stop)`` of it."""

    cuts: tuple[int, ...]
    start: int
    stop: int

    def part(self, member: int) -> tuple[int, int]:
        """The member's elements of the span, in bucket offsets; empty when start >= stop."""
        return max(self.start, self.cuts[member]), min(self.stop, self.cuts[member + 1])

    def covers(self, member: int) -> bool:
        start, stop = self.part(member)
        return start < stop


Place = Everywhere | Owner | Span
EVERYWHERE = Everywhere()
