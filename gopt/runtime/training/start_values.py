"""Start values that several ranks hold: compared by digest along every mesh axis, or copied from the group's first
rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.artifact.manifest import LocalState, Manifest
from gopt.collectives.node import format_shape
from gopt.errors import RunError
from gopt.ir.graph import COMM, Node
from gopt.ir.types import TensorType
from gopt.records.mesh import Mesh
from gopt.runtime.device import Device
from gopt.runtime.engines.base import Engine
from gopt.runtime.session import Array

ALL = "all"
"""Every axis of the mesh, for ``sync_axes``."""


def sync_axes(text: str | None, mesh: Mesh) -> tuple[str, ...]:
    """The axes that ``--sync-init`` names: ``all`` or a group such as ``dp+tp``; empty for None.

    Raises OptionError for an axis that the mesh does not have.
    """
    if text is None:
        return ()
    return tuple(name for name, _ in mesh.axes) if text == ALL else mesh.split(text)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Which states of the ranks are replicated along which axes: those whose pieces are the same on all members."""

    manifest: Manifest
    mesh: Mesh
    _known: dict[tuple[str, int], list[str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _firsts: list[tuple[int, int, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Rank, place of an axis, and the first rank of its group along it, where that is another."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which there is more than one rank."""
        return tuple(name for name, size in self.mesh.axes if size > 1)

    def along(self, axis: str, rank: int) -> list[str]:
        """The inputs of states that all members of a rank's group along an axis hold, in the manifest's order."""
        first = self.mesh.first(axis, rank)
        if (axis, first) not in self._known:
            self._known[axis, first] = self._along(axis, first)
        return self._known[axis, first]

    def _along(self, axis: str, rank: int) -> list[str]:
        data = axis in self.mesh.data_axes
        members = self.mesh.members(axis, rank)
        held = [{each.input: each for each in self.manifest.ranks[member].state} for member in members]
        alike = [name for name, each in held[0].items() if all(_same(each, other.get(name)) for other in held[1:])]
        common = [each.input for each in self.manifest.common.state if not (each.local and data)]
        return [*common, *(name for name in alike if not (held[0][name].local and data))]

    def differ(self, everything: Sequence[Sequence[str]]) -> bool:
        """Return whether members of a group have different digests; ``everything``: of every rank, one for each
        axis."""
        if not self._firsts:
            found = (
                (rank, place, self.mesh.first(axis, rank))
                for rank in range(self.mesh.ranks) for place, axis in enumerate(self.axes)
            )  # fmt: skip
            self._firsts.extend(each for each in found if each[0] != each[2])
        return any(everything[rank][place] != everything[first][place] for rank, place, first in self._firsts)


def _same(one: LocalState, other: LocalState | None) -> bool:
    return other is not None and one.pieces == other.pieces and one.copy == other.copy


def take_from_first(
    engine: Engine, replicas: Replicas, axes: Sequence[str], device: Device, states: dict[str, Any],
    types: Mapping[str, TensorType],
) -> None:  # fmt: skip
    """Replace replicated start values along some axes by those of the first rank of each group.

    ``types``: of the rank's states. Axes are processed one after the other, so that several make all replicas equal.
    """
    plan = {axis: replicas.along(axis, engine.rank) for axis in replicas.axes if axis in axes}
    if (
        apart := _compared(engine, replicas, {axis: dict.fromkeys(names, "") for axis, names in plan.items()})
    ) is not None:
        raise _start_error(apart)
    engine.prepare(list(plan))
    number = 0
    for axis, names in plan.items():
        first = replicas.mesh.index(axis, engine.rank) == 0
        for name in names:
            if not states[name].size:
                continue
            shape = format_shape(states[name].shape)
            attributes = {"group": axis, "root": 0, "dtype": types[name].dtype, "shapes": [shape]}
            node = Node("Broadcast", [name] if first else [], [name], domain=COMM, attributes=attributes)
            given = [device.view(device.to_device(states[name]))] if first else []
            states[name] = device.to_host(engine.call(number, node, given)[0])
            number += 1


def check_equal(engine: Engine, replicas: Replicas, states: Mapping[str, Array]) -> None:
    """Raise RunError, which names the first state that differs, where ranks start with different values of a replicated
    state.

    One digest for each axis is exchanged; one for each state only where those differ.
    """
    found = difference(
        engine, replicas, lambda name: hashlib.sha256(np.ascontiguousarray(states[name]).tobytes()).hexdigest()
    )
    if found is not None:
        raise _start_error(found)


def difference(engine: Engine, replicas: Replicas, digest: Callable[[str], str]) -> StartDifference | None:
    """The first state that ranks hold in common and that differs among them, the same on all ranks, which all call it;
    None where all agree. ``digest``: of a state of this rank."""
    digests = functools.cache(digest)
    own = {axis: {name: digests(name) for name in replicas.along(axis, engine.rank)} for axis in replicas.axes}
    return _compared(engine, replicas, own)


@dataclass(frozen=True, slots=True)
class StartDifference:
    """Ranks whose value of a state differs from that of the first rank of their group along an axis."""

    axis: str
    state: str
    first: int
    others: tuple[int, ...]

    @property
    def who(self) -> str:
        """The ranks as a text."""
        return f"rank{'s' * (len(self.others) > 1)} {', '.join(map(str, self.others))}"


def _start_error(found: StartDifference) -> RunError:
    return RunError(
        f"{found.who} and rank {found.first} start with different values of {found.state!r}, which they hold in common "
        f"along {found.axis}",
        f"give all the same files, or take those of rank {found.first} with --sync-init {found.axis}",
    )


def _compared(engine: Engine, replicas: Replicas, own: Mapping[str, Mapping[str, str]]) -> StartDifference | None:
    """``own``: by axis, the digest of every state that this rank holds as a replica along it."""
    digests = {axis: hashlib.sha256(repr(list(each.items())).encode()).hexdigest() for axis, each in own.items()}
    if replicas.differ(engine.gather([digests.get(axis, "") for axis in replicas.axes])):
        return first_difference(replicas.mesh, list(own), engine.gather(own))
    return None


def first_difference(
    mesh: Mesh, axes: Sequence[str], found: Sequence[Mapping[str, Mapping[str, str]]]
) -> StartDifference:  # fmt: skip
    """``found``: for every rank, by axis and state, the digest of its value."""
    for axis in axes:
        for first in (rank for rank in range(mesh.ranks) if mesh.index(axis, rank) == 0):
            for name, digest in found[first][axis].items():
                others = [rank for rank in mesh.members(axis, first) if found[rank][axis].get(name) != digest]
                if others:
                    return StartDifference(axis, name, first, tuple(others))
    raise RunError("ranks have different states", "all ranks need the files of one gopt shard")
