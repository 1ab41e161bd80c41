"""The halo: places of a dimension that members take from one another, for overlapping windows and for sums of these.

The same record serves both directions. An exchange gives every member a window: own places and places of other members.
A sum is the dual: every member has terms for the places of a window, and sends terms of others' places to the owners.
Members join the *strips* that others need in one call; a strip may come from any member, so a window may have any
width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from gopt.records.placements import Ranges, Shard, Window

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HaloPiece:
    """Places ``[start, stop)`` of the dimension, stored from position ``at`` on.

    ``strips``: stored in the concatenated strips of all members, else in the member's own value.
    """

    start: int
    stop: int
    at: int
    strips: bool = False


@dataclass(frozen=True)
class Halo:
    """Parts of a dimension, in ``sizes``, and windows of it, ``ranges``: a part and a window for every member.

    ``kind``: whether members have their parts and make windows (``exchange``), have terms for windows and make parts
    (``sum``), or have the whole dimension and cut windows out (``cut``).
    """

    sizes: tuple[int, ...]
    ranges: Ranges
    kind: str = "exchange"

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Halo:
        """Parse the attributes of a node of ``gopt.spmd``."""
        ends = attributes["ranges"]
        return cls(tuple(attributes["sizes"]), tuple(zip(ends[::2], ends[1::2])), str(attributes["kind"]))

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the node."""
        return {
            "sizes": list(self.sizes), "ranges": [end for span in self.ranges for end in span], "kind": self.kind,
        }  # fmt: skip

    @cached_property
    def parts(self) -> Ranges:
        """The places of each member's part."""
        return tuple(pairwise((0, *accumulate(self.sizes))))

    @property
    def length(self) -> int:
        """Elements of the dimension."""
        return sum(self.sizes)

    @cached_property
    def held(self) -> Ranges:
        """Return each member's range before the exchange: the part, or the window inside the dimension."""
        if self.kind == "cut":
            return ((0, self.length),) * len(self.ranges)
        return self._there if self.kind == "sum" else self.parts

    @cached_property
    def _there(self) -> Ranges:
        return tuple(_inside(span, (0, self.length)) for span in self.ranges)

    @cached_property
    def wanted(self) -> Ranges:
        """Range of each member after the exchange, clipped to the dimension."""
        return self.parts if self.kind == "sum" else self._there

    @cached_property
    def strips(self) -> tuple[tuple[Range, ...], ...]:
        """Each member's ranges needed by other members, in order."""
        if self.kind == "cut":
            return ((),) * len(self.ranges)
        return tuple(
            _joined(_inside(have, want) for peer, want in enumerate(self.wanted) if peer != member)
            for member, have in enumerate(self.held)
        )

    @cached_property
    def strip_sizes(self) -> tuple[int, ...]:
        """Places each member hands out."""
        return tuple(sum(stop - start for start, stop in strip) for strip in self.strips)

    @property
    def sends(self) -> int:
        """The most places a member sends on a ring, on which strips of all others pass through it."""
        return sum(self.strip_sizes) - min(self.strip_sizes)

    @cached_property
    def _joined_at(self) -> tuple[tuple[HaloPiece, ...], ...]:
        """Positions of each member's strips in the concatenated strips."""
        joined, at = [], 0
        for strips in self.strips:
            pieces = []
            for start, stop in strips:
                pieces.append(HaloPiece(start, stop, at, strips=True))
                at += stop - start
            joined.append(tuple(pieces))
        return tuple(joined)

    def own(self, member: int, at: Range) -> HaloPiece:
        """Return the piece for a range of a member's own value."""
        if self.kind == "cut":
            return HaloPiece(*at, at[0])
        start, _ = (self.ranges if self.kind == "sum" else self.parts)[member]
        return HaloPiece(*at, at[0] - start)

    def strip_pieces(self, member: int) -> list[HaloPiece]:
        """Return the positions of a member's strips in its own value."""
        return [self.own(member, strip) for strip in self.strips[member]]

    def sources(self, member: int) -> list[HaloPiece]:
        """Return all pieces of wanted places, from the member and from others in order; no piece is empty."""
        sources = []
        for peer, have in enumerate(self.held):
            if peer == member:
                pieces = [self.own(member, _inside(have, self.wanted[member]))]
            else:
                pieces = [_cut(piece, self.wanted[member]) for piece in self._joined_at[peer]]
            sources += [piece for piece in pieces if piece.start < piece.stop]
        return sources

    def runs(self, member: int) -> list[tuple[Range, list[HaloPiece]]]:
        """Return the ranges a member needs, in order, each with all available pieces.

        An exchange has one piece, a sum every term or no term.
        """
        sources = self.sources(member)
        ends = sorted({*self.wanted[member], *(end for source in sources for end in (source.start, source.stop))})
        return [
            (
                (start, stop),
                [_cut(source, (start, stop)) for source in sources if source.start <= start and stop <= source.stop],
            )
            for start, stop in pairwise(ends)
        ]

    def border(self, member: int) -> tuple[int, int]:
        """Return the numbers of places of a member's window in front of the dimension and behind."""
        start, stop = self.ranges[member]
        before = max(min(0, stop) - start, 0)
        return before, max(stop - max(self.length, start), 0)


def shared_like(sizes: Sequence[int], length: int) -> tuple[int, ...]:
    """Another length shared out as ``sizes`` share out theirs, to the nearest place."""
    total = sum(sizes) or 1
    ends = [(2 * end * length + total) // (2 * total) for end in accumulate(sizes)]
    return tuple(stop - start for start, stop in pairwise((0, *ends)))


def window(dim: int, ranges: Ranges, length: int, border: str = "zeros") -> Shard | Window:
    """Return a window; a Shard if the windows partition the dimension."""
    if tiled(ranges, length):
        return Shard(dim, tuple(stop - start for start, stop in ranges))
    return Window(dim, ranges, length, border)


def tiled(ranges: Sequence[Range], length: int) -> bool:
    """Return whether ranges partition a dimension."""
    ends = [0, *(end for span in ranges for end in span), length]
    return all(a == b for a, b in zip(ends[::2], ends[1::2])) and all(start <= stop for start, stop in ranges)


def _inside(one: Range, bounds: Range) -> Range:
    start = max(one[0], bounds[0])
    return start, max(min(one[1], bounds[1]), start)


def _cut(piece: HaloPiece, to: Range) -> HaloPiece:
    start, stop = _inside((piece.start, piece.stop), to)
    return HaloPiece(start, stop, piece.at + start - piece.start, piece.strips)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order; adjoining ranges are merged."""
    joined: list[Range] = []
    for start, stop in sorted(span for span in ranges if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)
