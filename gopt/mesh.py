"""The ranks as a row-major grid with named axes. Pure arithmetic, no graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gopt.errors import OptionError

DATA_AXES = ("dp", "shard")
"""Ranks along these axes see different batches; along all others the same (contract section 1)."""


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes; the last axis varies fastest.

    ``Mesh((("dp", 2), ("shard", 4)))`` has 8 ranks; rank 5 stands at dp=1, shard=1.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names:
            raise OptionError("a mesh needs at least one axis", "write it as --mesh dp=2,shard=4")
        for name, size in self.axes:
            if not name.isidentifier():
                raise OptionError(f"mesh axis {name!r} is no identifier")
            if size < 1:
                raise OptionError(f"mesh axis {name} has size {size}; it needs at least 1")
        if len(set(names)) != len(names):
            raise OptionError(f"mesh axis named twice in {self}")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read ``dp=2,shard=4``; raises OptionError on anything else."""
        axes = []
        for part in text.split(","):
            name, equals, size = part.partition("=")
            if not equals or not size.strip().lstrip("-").isdigit():
                raise OptionError(f"cannot read {part!r} as a mesh axis", "write it as --mesh dp=2,shard=4")
            axes.append((name.strip(), int(size)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, group: str) -> int:
        """Number of members of a group such as ``shard`` or ``dp+shard``."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in self.split(group))

    def split(self, group: str) -> tuple[str, ...]:
        """The axes of a group; raises OptionError when one is unknown or out of mesh order."""
        order = [name for name, _ in self.axes]
        axes = tuple(group.split("+"))
        unknown = [axis for axis in axes if axis not in order]
        if unknown:
            raise OptionError(f"group {group!r} names no axis of the mesh {self}: {unknown[0]!r}")
        if list(axes) != sorted(set(axes), key=order.index):
            raise OptionError(f"group {group!r} does not name its axes in the order of the mesh {self}")
        return axes

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank by axis name."""
        result = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return result

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """Ranks that share every coordinate with ``rank`` but the group's axes, in rank order."""
        axes = self.split(group)
        own = self.coordinates(rank)
        return tuple(
            other
            for other in range(self.ranks)
            if all(value == own[name] for name, value in self.coordinates(other).items() if name not in axes)
        )

    def index(self, group: str, rank: int) -> int:
        """Place of a rank inside its group."""
        sizes = dict(self.axes)
        own = self.coordinates(rank)
        place = 0
        for axis in self.split(group):
            place = place * sizes[axis] + own[axis]
        return place

    @property
    def data_group(self) -> str | None:
        """The group over which gradients are averaged: all data axes of the mesh, or None."""
        axes = [name for name, _ in self.axes if name in DATA_AXES]
        return "+".join(axes) or None
