"""Start values that several ranks hold: compared by digest along every mesh axis, or copied from the group's first
rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import LocalState
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
    """The axes of ``--sync-init``: ``all`` or a group such as ``dp+tp``; empty for None.

    Raises OptionError for an axis outside the mesh."""
    if text is None:
        return ()
    return tuple(name for name, _ in mesh.axes) if text == ALL else mesh.split(text)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The states of ranks that are replicated along an axis: all members have the same pieces."""

    manifest: Manifest
    mesh: Mesh
    _replicated: dict[tuple[str, int], list[str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _firsts: list[tuple[int, int, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Rank, place of an axis, and the first rank of its group along it, where that is another."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes with more than one rank."""
        return tuple(name for name, size in self.mesh.axes if size > 1)

    def along(self, axis: str, rank: int) -> list[str]:
        """The state inputs held by all members of a rank's group along an axis, in the manifest's order."""
        leader = self.mesh.first(axis, rank)
        if (axis, leader) not in self._replicated:
            self._replicated[axis, leader] = self._along(axis, leader)
        return self._replicated[axis, leader]

    def _along(self, axis: str, rank: int) -> list[str]:
        data = axis in self.mesh.data_axes
        members = self.mesh.members(axis, rank)
        states = [{state.input: state for state in self.manifest.ranks[member].state} for member in members]
        alike = [name for name, state in states[0].items() if all(_same(state, peer.get(name)) for peer in states[1:])]
        common = [state.input for state in self.manifest.common.state if not (state.local and data)]
        return [*common, *(name for name in alike if not (states[0][name].local and data))]

    def differ(self, everything: Sequence[Sequence[str]]) -> bool:
        """Return whether members of a group have different digests; ``everything``: of every rank, one for each
        axis."""
        if not self._firsts:
            triples = (
                (rank, index, self.mesh.first(axis, rank))
                for rank in range(self.mesh.ranks) for index, axis in enumerate(self.axes)
            )  # fmt: skip
            self._firsts.extend(triple for triple in triples if triple[0] != triple[2])
        return any(everything[rank][index] != everything[leader][index] for rank, index, leader in self._firsts)


def _same(one: LocalState, peer: LocalState | None) -> bool:
    return peer is not None and one.pieces == peer.pieces and one.copy == peer.copy


def take_from_first(
    engine: Engine, replicas: Replicas, axes: Sequence[str], device: Device, states: dict[str, Any],
    types: Mapping[str, TensorType],
) -> None:  # fmt: skip
    """Replace replicated start values along some axes by the values of each group's first rank.

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
        is_leader = replicas.mesh.index(axis, engine.rank) == 0
        for name in names:
            if not states[name].size:
                continue
            shape = format_shape(states[name].shape)
            attributes = {"group": axis, "root": 0, "dtype": types[name].dtype, "shapes": [shape]}
            node = Node("Broadcast", [name] if is_leader else [], [name], domain=COMM, attributes=attributes)
            operands = [device.view(device.to_device(states[name]))] if is_leader else []
            states[name] = device.to_host(engine.call(number, node, operands)[0])
            number += 1


def check_equal(engine: Engine, replicas: Replicas, states: Mapping[str, Array]) -> None:
    """Raise RunError with the first replicated state whose start values differ between ranks.

    One digest for each axis is exchanged; digests of single states only where axes differ."""
    mismatch = difference(
        engine, replicas, lambda name: hashlib.sha256(np.ascontiguousarray(states[name]).tobytes()).hexdigest()
    )
    if mismatch is not None:
        raise _start_error(mismatch)


def difference(engine: Engine, replicas: Replicas, digest: Callable[[str], str]) -> StartDifference | None:
    """The first state that ranks hold in common and that differs, the same on all ranks, which all call this function;
    None where all agree. ``digest``: of a state of this rank."""
    digests = functools.cache(digest)
    by_axis = {axis: {name: digests(name) for name in replicas.along(axis, engine.rank)} for axis in replicas.axes}
    return _compared(engine, replicas, by_axis)


@dataclass(frozen=True, slots=True)
class StartDifference:
    """Ranks whose value of a state differs from the value on the group's first rank along an axis."""

    axis: str
    state: str
    first: int
    others: tuple[int, ...]

    @property
    def who(self) -> str:
        """The ranks as a text."""
        return f"rank{'s' * (len(self.others) > 1)} {', '.join(map(str, self.others))}"


def _start_error(mismatch: StartDifference) -> RunError:
    return RunError(
        f"{mismatch.who} and rank {mismatch.first} start with different values of {mismatch.state!r}, which they hold "
        f"in common along {mismatch.axis}",
        f"give all the same files, or take the values of rank {mismatch.first} with --sync-init {mismatch.axis}",
    )


def _compared(engine: Engine, replicas: Replicas, by_axis: Mapping[str, Mapping[str, str]]) -> StartDifference | None:
    """``by_axis``: the digest of every state that this rank holds as a replica along an axis."""
    digests = {
        axis: hashlib.sha256(repr(list(states.items())).encode()).hexdigest() for axis, states in by_axis.items()
    }
    if replicas.differ(engine.gather([digests.get(axis, "") for axis in replicas.axes])):
        return first_difference(replicas.mesh, list(by_axis), engine.gather(by_axis))
    return None


def first_difference(
    mesh: Mesh, axes: Sequence[str], digests: Sequence[Mapping[str, Mapping[str, str]]]
) -> StartDifference:  # fmt: skip
    """``digests``: for every rank, by axis and state, the digest of the value."""
    for axis in axes:
        for leader in (rank for rank in range(mesh.ranks) if mesh.index(axis, rank) == 0):
            for name, digest in digests[leader][axis].items():
                different = [rank for rank in mesh.members(axis, leader) if digests[rank][axis].get(name) != digest]
                if different:
                    return StartDifference(axis, name, leader, tuple(different))
    raise RunError("ranks have different states", "all ranks need the files of one gopt shard")
