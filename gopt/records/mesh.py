"""The ranks as a row-major grid with named axes, and the data seen along each axis. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from gopt import limits
from gopt.errors import OptionError
from gopt.options.records import check_types
from gopt.options.types import is_digits, is_whole
from gopt.text.sanitize import show


class AxisKind(str, Enum):
    """The data read by the ranks along an axis."""

    DATA = "data"
    """Each rank its own samples."""
    REPLICA = "replica"
    """All the same samples."""
    PART = "part"
    """The same samples, each rank another part of them."""


AXES = {
    "dp": AxisKind.DATA, "shard": AxisKind.DATA,
    "tp": AxisKind.REPLICA, "ep": AxisKind.REPLICA, "pp": AxisKind.REPLICA,
    "cp": AxisKind.PART, "sp": AxisKind.PART, "h": AxisKind.PART, "w": AxisKind.PART,
}  # fmt: skip
"""The axes with known names (contract section 1). For any other axis the user gives the kind of data."""

PIPELINE = "pp"
"""The axis of a mesh along which the step is cut into stages."""
SHARD, TENSOR, EXPERT = "shard", "tp", "ep"
TOKENS = ("cp", "sp")
"""Axes whose ranks see parts of the tokens of a batch."""
SPACE = ("h", "w")
"""Axes whose ranks see parts of the places of images."""
_ELSEWHERE = {
    "data": "dp", "ddp": "dp", "dp_replicate": "dp", "replicate": "dp", "batch": "dp",
    "fsdp": "shard", "zero": "shard", "dp_shard": "shard", "sharding": "shard",
    "tensor": "tp", "mp": "tp", "model": "tp", "expert": "ep", "pipe": "pp", "context": "cp", "seq": "sp",
}  # fmt: skip
"""Their names in other tools."""


def nearest(name: str) -> str:
    """The known axis meant by a name, or ''."""
    close = get_close_matches(name.lower(), AXES, 3)
    close.sort(key=lambda item: item[0] != name[0].lower())  # dpp is dp, as near as pp
    return _ELSEWHERE.get(name.lower()) or (close[0] if close else "")


def axis_kinds(texts: Iterable[str] | Mapping[str, str]) -> dict[str, AxisKind]:
    """``["rep=replica", "zone=data"]``, or the same as a table -> axis -> kind; raises OptionError."""
    pairs = texts.items() if isinstance(texts, Mapping) else [text.partition("=")[::2] for text in texts]
    result: dict[str, AxisKind] = {}
    for name, word in pairs:
        if not name.isidentifier() or word not in (AxisKind.DATA.value, AxisKind.REPLICA.value):
            raise OptionError(
                f"cannot read {name}={word} as the kind of a mesh axis",
                "write --axis NAME=data where each rank reads its own samples, --axis NAME=replica where they see "
                "the same",
            )
        if name in AXES and AXES[name] is not AxisKind(word):
            raise OptionError(
                f"mesh axis {name} cannot be of kind {word}: it is known as one of kind {AXES[name].value}",
                "give the axis another name",
            )
        if result.setdefault(name, AxisKind(word)) is not AxisKind(word):
            raise OptionError(
                f"mesh axis {name} is given two kinds, {result[name].value} and {word}", "keep one --axis for it"
            )
    return result


def format_axes(axes: Iterable[tuple[str, int]]) -> str:
    """The axes as the value of ``--mesh``: dp=2,shard=4."""
    return ",".join(f"{name}={size}" for name, size in axes)


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes; the last axis varies fastest.

    ``Mesh((("dp", 2), ("shard", 4)))`` has 8 ranks; rank 5 stands at dp=1, shard=1. ``kinds``: the user's kinds of
    axes, needed for an axis outside ``AXES``. Raises OptionError."""

    axes: tuple[tuple[str, int], ...]
    kinds: tuple[tuple[str, AxisKind], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        names = [name for name, _ in self.axes]
        if not names:
            raise OptionError("a mesh needs at least one axis", "write it as --mesh dp=2,shard=4")
        for name, size in self.axes:
            if not name.isidentifier():
                raise OptionError(f"mesh axis {name!r} is not an identifier", "use letters, digits and _, such as dp")
            if size < 1:
                raise OptionError(f"mesh axis {name} has size {size}", "give at least 1")
        if self.ranks > limits.RANKS:
            count = self.ranks if self.ranks < 1 << 63 else "more than 2**63"
            raise OptionError(
                f"a mesh of {count} ranks is too large: gopt makes at most {limits.RANKS} (RANKS)",
                "take smaller axes",
                *([limits.hint("RANKS", self.ranks)] if self.ranks < 1 << 40 else []),
            )
        if len(set(names)) != len(names):
            raise OptionError(f"mesh axis named twice in {self}", "give each axis once, e.g. dp=2,shard=4")
        kinds = dict(self.kinds)
        for name in names:
            if name not in AXES and name not in kinds:
                close = nearest(name)
                raise OptionError(
                    f"no mesh axis is called {name!r}",
                    *([f"did you mean {close!r}?"] if close else [f"there are {', '.join(AXES)}"]),
                    f"or give the kind of its data: --axis {name}=replica (the same samples) or --axis {name}=data",
                )
        idle = next((name for name in kinds if name not in names), None)
        if idle is not None:
            raise OptionError(
                f"--axis gives the kind of {idle!r}, which is not an axis of the mesh {self}", "leave it out"
            )

    @classmethod
    def parse(cls, text: str, kinds: Mapping[str, AxisKind] | None = None) -> Mesh:
        """Read ``dp=2,shard=4``; raises OptionError on anything else."""
        axes = []
        for part in text.split(","):
            name, equals, size = part.partition("=")
            if not equals or not is_digits(size.strip().removeprefix("-")):
                raise OptionError(f"cannot read {show(part)} as a mesh axis", "write it as --mesh dp=2,shard=4")
            axes.append((name.strip(), int(size)))
        return cls(tuple(axes), tuple((kinds or {}).items()))

    @classmethod
    def of(cls, mesh: Mesh | int | str) -> Mesh:
        """A mesh as given, ``dp=2,shard=4`` read, or a number of ranks along ``shard``; raises OptionError."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, str):
            return cls.parse(mesh)
        if not is_whole(mesh):
            raise OptionError(f"a mesh cannot be {mesh!r}", "write it as dp=2,shard=4, or as a number of ranks")
        return cls(((SHARD, int(mesh)),))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Mesh:
        """The inverse of ``to_json``. Before kinds were written, an axis of any other name saw the same samples."""
        axes = tuple((str(name), int(size)) for name, size in record["axes"])
        kinds = {name: AxisKind(word) for name, word in record.get("kinds", {}).items()}
        kinds |= {name: AxisKind.REPLICA for name, _ in axes if name not in AXES and name not in kinds}
        return cls(axes, tuple(kinds.items()))

    def to_json(self) -> dict[str, Any]:
        """As in the manifest; ``kinds`` only if the user gave some."""
        record: dict[str, Any] = {"axes": [[name, size] for name, size in self.axes], "ranks": self.ranks}
        return record | ({"kinds": {name: kind.value for name, kind in self.kinds}} if self.kinds else {})

    def kind(self, axis: str) -> AxisKind:
        """The data read by the ranks along an axis of the mesh."""
        return dict(self.kinds).get(axis) or AXES[axis]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes of ranks with different samples, in mesh order: the only place with this rule."""
        return tuple(name for name, _ in self.axes if self.kind(name) is AxisKind.DATA)

    def live(self, group: str) -> tuple[str, ...]:
        """The axes of a group with more than one rank."""
        sizes = dict(self.axes)
        return tuple(axis for axis in self.split(group) if sizes[axis] > 1)

    def __str__(self) -> str:
        return format_axes(self.axes)

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, group: str) -> int:
        """Number of members of a group such as ``shard`` or ``dp+shard``."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in self.split(group))

    def along(self, axis: str) -> int:
        """Number of members along an axis; 1 for a mesh without the axis."""
        return dict(self.axes).get(axis, 1)

    def split(self, group: str) -> tuple[str, ...]:
        """The axes of a group; raises OptionError for an unknown axis, or one out of mesh order."""
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

    def batch_of(self, rank: int) -> tuple[int, ...]:
        """The coordinates that settle what a rank is fed: ranks that compute a batch together have equal ones, unless
        they see other parts of the samples."""
        return tuple(at for axis, at in self.coordinates(rank).items() if self.kind(axis) is not AxisKind.REPLICA)

    def first(self, group: str, rank: int) -> int:
        """The first rank of a rank's group, different for every group of the name."""
        axes, coordinates, stride = self.split(group), self.coordinates(rank), self.ranks
        for name, size in self.axes:
            stride //= size
            rank -= coordinates[name] * stride if name in axes else 0
        return rank

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """Ranks that share every coordinate with ``rank`` except on the group's axes, in rank order."""
        axes, coordinates = self.split(group), self.coordinates(rank)
        members, stride = [0], self.ranks
        for name, size in self.axes:
            stride //= size
            steps = range(size) if name in axes else (coordinates[name],)
            members = [base + position * stride for base in members for position in steps]
        return tuple(members)

    def index(self, group: str, rank: int) -> int:
        """Index of a rank inside the group."""
        return self.index_at(group, self.coordinates(rank))

    def index_at(self, group: str, coordinates: Mapping[str, int]) -> int:
        """Index of the rank at ``coordinates`` inside the group."""
        sizes, position = dict(self.axes), 0
        for axis in self.split(group):
            position = position * sizes[axis] + coordinates[axis]
        return position

    @property
    def splits_computation(self) -> bool:
        """Whether ranks along an axis of a known name compute parts of one batch together."""
        kinds = dict(self.kinds)
        return any(size > 1 and name not in self.data_axes and name not in kinds for name, size in self.axes)

    @property
    def shard_axis(self) -> str:
        """The axis that shares out states: ``shard``; '' for one rank."""
        return SHARD if dict(self.axes).get(SHARD, 1) > 1 else ""

    @property
    def shard_ranks(self) -> int:
        """How many ranks share out the states."""
        return self.size(self.shard_axis) if self.shard_axis else 1

    @property
    def replica_group(self) -> str | None:
        """The data axes beside ``shard_axis``, with equal shards on their ranks. None for one rank."""
        axes = [name for name in self.data_axes if name != SHARD]
        group = "+".join(axes)
        return group if axes and self.size(group) > 1 else None

    @property
    def data_group(self) -> str | None:
        """The group of averaged gradients: all data axes of the mesh, or None."""
        return "+".join(self.data_axes) or None

    @property
    def data_ranks(self) -> int:
        """How many ranks see different samples."""
        return self.size(self.data_group) if self.data_group is not None else 1
