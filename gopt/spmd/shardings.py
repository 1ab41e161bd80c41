"""The sharding of every value of a program: a table filled by the verifier, and the placements of states and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gopt.ir.types import TensorType
from gopt.records.placements import (
    FULLY_REPLICATED,
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    PerMember,
    Place,
    Placement,
    Placements,
    Replicated,
    Shard,
    Sharding,
)
from gopt.spmd.program import Accumulator, ShardedState, SpmdProgram
from gopt.spmd.rules import Operand

T = TypeVar("T")
SHARDS = (Shard, FlatShard)


@dataclass(slots=True)
class Shardings:
    """The sharding of every value not replicated along all axes. ``axes``: axes with several members."""

    program: SpmdProgram
    axes: tuple[str, ...] = field(init=False)
    known: dict[str, Placements] = field(default_factory=dict)
    equal: Placements = field(init=False)
    """Replicated along all axes."""
    own: Placements = field(init=False)
    """Each member's own along the axes whose members see different data."""
    everywhere: Placements = field(init=False)
    """Each member's own along all axes."""

    def __post_init__(self) -> None:
        mesh = self.program.mesh
        self.axes = tuple(name for name, size in mesh.axes if size > 1)
        self.everywhere = tuple(PER_MEMBER for _ in self.axes)
        self.equal = tuple(REPLICATED for _ in self.axes)
        self.own = tuple(PER_MEMBER if name in mesh.data_axes else REPLICATED for name in self.axes)

    def of(self, name: str) -> Placements:
        """The sharding of a value."""
        return self.known.get(name, self.equal)

    def sharding(self, name: str) -> Sharding:
        """The sharding of a value, by the names of axes."""
        return self._sharding(self.known.get(name, ()))

    def parts(self) -> dict[str, Sharding]:
        """Return the shardings of parts of buckets. Shards of a dimension are left out: the graph has their local
        types."""
        cuts = self._by_row(lambda row: any(isinstance(placement, FlatShard) for placement in row))
        return {name: sharding for name, sharding in self.by_name().items() if cuts[id(self.known[name])]}

    def by_name(self) -> dict[str, Sharding]:
        """Return the shardings of all values in the table."""
        shardings = self._by_row(self._sharding)
        return {name: shardings[id(placements)] for name, placements in self.known.items()}

    def _by_row(self, find: Callable[[Placements], T]) -> dict[int, T]:
        """Return what is found for placements, by id: many values share the object."""
        return {number: find(row) for number, row in {id(row): row for row in self.known.values()}.items()}

    def _sharding(self, placements: Placements) -> Sharding:
        by_axis = zip(self.axes, placements)
        return Sharding(tuple((axis, part) for axis, part in by_axis if not isinstance(part, Replicated)))

    def state(self, state: ShardedState) -> Placements:
        """Return the placements a state must have, before and after the step."""
        if state.local:
            return self.placed(self.own, state.sharding)
        placed = self.placed(self.equal, state.sharding)
        apart = self.program.parts.get(state.slices[0].tensor) if state.slices else None
        if apart is None:
            return placed
        axes = apart.sharding_axes
        return tuple(PER_MEMBER if axis in axes else placement for axis, placement in zip(self.axes, placed))

    def accumulator(self, sums: Accumulator) -> Placements:
        """Return the placements of an accumulator: rank-local sums, or shards of sums over the sharding group."""
        if sums.reduced:
            return self.equal
        placed = self.placed(self.own, sums.sharding)
        return tuple(PER_MEMBER if axis in sums.own_along else placement for axis, placement in zip(self.axes, placed))

    def batch(self, name: str) -> Placements:
        """Return the placements of a batch input: rank-local, also along axes with parts of the input."""
        fed = self.program.fed.get(name)
        axes = fed.sharding_axes if fed is not None else ()
        return tuple(PER_MEMBER if axis in axes else placement for axis, placement in zip(self.axes, self.own))

    def operands(self, names: Sequence[str], axis: int) -> tuple[Operand, ...]:
        """Return the operands of a node for a rule, with placements along an axis."""
        types = self.program.graph.types
        return tuple(_operand(name, self.of(name)[axis], types.get(name)) for name in names if name)

    def set(self, name: str, axis: int, placement: Placement) -> None:
        """Note the placement of a value along an axis."""
        row = list(self.of(name))
        row[axis] = placement
        self.note(name, tuple(row))

    def note(self, name: str, sharding: Placements) -> None:
        """Note the sharding of a value."""
        if name and sharding != self.equal:
            self.known[name] = sharding

    def give(self, results: Sequence[str], sharding: Placements) -> None:
        """Note a sharding for results of a node."""
        if sharding is not self.equal and sharding != self.equal:
            sharding = self.own if sharding == self.own else sharding
            for name in results:
                if name:  # an absent result is not a value
                    self.known[name] = sharding

    def placed(self, placements: Placements, sharding: Sharding) -> Placements:
        """Return ``placements``, overridden by ``sharding``."""
        if sharding is FULLY_REPLICATED:
            return placements
        placements_of = dict(sharding.by_axis)
        return tuple([placements_of.get(axis, placement) for axis, placement in zip(self.axes, placements)])

    def place(self, sharding: Sharding, axis: int) -> Place:
        """Return the members running a node along an axis."""
        placement = sharding.on(self.axes[axis]) if sharding is not FULLY_REPLICATED else REPLICATED
        assert isinstance(placement, (Replicated, OnMember, FlatShard))
        return placement


def _operand(name: str, placement: Placement, type: TensorType | None) -> Operand:
    if type is None or isinstance(placement, PerMember):
        return Operand(name, placement)
    return Operand(name, placement, type.elements == 1 and not isinstance(placement, SHARDS), type.dtype)
