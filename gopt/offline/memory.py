"""What a rank holds between steps and at most within one, from the rank-independent graph alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gopt.analysis.training import StateKind
from gopt.artifact.report import balance as one_balance
from gopt.collectives.layout import ITEM_BYTES
from gopt.ir.graph import Node
from gopt.ir.types import nbytes
from gopt.program import ShardedState, SpmdProgram
from gopt.sharding.traffic import Carries, CollectiveCall, find_calls
from gopt.sharding.verifier import Shardings

VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Select"})
"""Operators whose result can share its operand's memory."""


@dataclass(frozen=True, slots=True)
class LivePeaks:
    """Largest sums of bytes alive at once, each at its own moment; ``peak`` of all of them together.

    ``activations``: whatever is neither a gradient nor gathered.
    """

    peak: int
    activations: int
    gradients: int
    gathered: int


def members(program: SpmdProgram) -> list[dict[str, int]]:
    """The coordinates of one rank for each part of the states: what ranks along other axes hold is of the same size."""
    axis, first = program.mesh.shard_axis, program.mesh.coordinates(0)
    places = [first | dict(place) for variant in program.variants for place in variant.places[:1]] or [first]
    return [at | {axis: member} for at in places for member in range(program.mesh.size(axis))] if axis else places


def held(program: SpmdProgram) -> dict[str, list[int]]:
    """Bytes of parameters (low-precision copies included) and optimizer states that each of ``members`` holds."""
    kinds = {state.tensor: state.kind for state in program.training.states}
    ranks = members(program)
    result = {"parameters": [0] * len(ranks), "optimizer_states": [0] * len(ranks)}
    for number, coordinates in enumerate(ranks):
        for state in program.at(coordinates).states:
            kind = kinds[state.slices[0].tensor]
            if kind is StateKind.PARAMETER:
                result["parameters"][number] += _state_bytes(state, coordinates)
            elif kind in (StateKind.OPTIMIZER_STATE, StateKind.ACCUMULATOR):
                result["optimizer_states"][number] += _state_bytes(state, coordinates)
    return result


def _state_bytes(state: ShardedState, coordinates: Mapping[str, int]) -> int:
    elements = sum(part.elements for part in state.slices)
    shape = state.sharding.local_shape((elements,), coordinates)
    return nbytes(state.dtype, math.prod(shape)) if state.sharding.covers(coordinates) else 0


def reduced_gradient_bytes(program: SpmdProgram) -> list[int]:
    """Bytes of reduced gradients of each of ``members``."""
    local = set(program.training.gradients.values())
    calls = {id(variant): find_calls(variant) for variant in program.variants}
    result = []
    for coordinates in members(program):
        variant, total = program.at(coordinates), 0
        for call in calls[id(variant)]:
            if call.carries is Carries.GRADIENTS and any(name in local for name in call.node.inputs):
                cuts, member = call.node.attributes.get("cuts"), coordinates.get(program.mesh.shard_axis, 0)
                item = ITEM_BYTES[variant.graph.types[call.node.outputs[0]].dtype]
                total += round((cuts[member + 1] - cuts[member]) * item if cuts else call.payload * (1 - call.beside))
        result.append(total)
    return result


def balance(rows: Mapping[str, Sequence[int]]) -> float:
    """The largest max / mean of the kinds; 1 when nothing is held."""
    return max((one_balance(row) for row in rows.values()), default=1.0)


def live(program: SpmdProgram, calls: Sequence[CollectiveCall], coordinates: Mapping[str, int]) -> LivePeaks:
    """Peaks of what is alive on a rank beside states, inputs and constants, in the order of the nodes.

    A new state takes its old one's place. One sweep to see last readers, one to count.
    """
    nodes = [node for node in program.graph.nodes if node.sharding.covers(coordinates)]
    sizer = _Sizer(program, coordinates)
    last: dict[str, int] = {}
    for place, node in enumerate(nodes):
        sizer.note(node)
        for name in node.reads:
            last[sizer.root.get(name, name)] = place
    ends: dict[int, list[str]] = {}
    for name, place in last.items():
        ends.setdefault(place, []).append(name)
    kinds = _kinds(program, calls)
    now = {"": 0, "gradients": 0, "gathered": 0, "activations": 0}
    peak = dict(now)
    for place, node in enumerate(nodes):
        for name in node.outputs:
            _count(now, kinds.get(name, "activations"), sizer.size.get(name, 0))
        for kind, value in now.items():
            peak[kind] = max(peak[kind], value)
        for name in ends.get(place, ()):
            _count(now, kinds.get(name, "activations"), -sizer.size.get(name, 0))
    return LivePeaks(peak[""], peak["activations"], peak["gradients"], peak["gathered"])


def _count(now: dict[str, int], kind: str, change: int) -> None:
    now[kind] += change
    now[""] += change


def _kinds(program: SpmdProgram, calls: Sequence[CollectiveCall]) -> dict[str, str]:
    kinds = dict.fromkeys(program.training.gradients.values(), "gradients")
    for call in calls:
        if call.before_use or call.carries is Carries.GRADIENTS:
            kinds.update(dict.fromkeys(call.node.outputs, "gathered" if call.before_use else "gradients"))
    return kinds


class _Sizer:
    """Bytes of every value on one rank; views cost nothing and keep alive what they look at."""

    def __init__(self, program: SpmdProgram, coordinates: Mapping[str, int]) -> None:
        self.types, self.coordinates = program.graph.types, coordinates
        self.shardings = Shardings(program, strict=False).infer()
        self.kept = {state.output for state in program.states}
        self.size: dict[str, int] = {}
        self.root: dict[str, str] = {}

    def note(self, node: Node) -> None:
        """Learn the sizes of what a node makes; nodes come in order."""
        if node.op_type in VIEWS and node.inputs[0]:
            self.root[node.outputs[0]] = self.root.get(node.inputs[0], node.inputs[0])
            return
        for name in node.outputs:
            type = self.types.get(name)
            if name and name not in self.kept and type is not None and type.static:
                shape = self.shardings.sharding(name).local_shape(type.dims, self.coordinates)
                self.size[name] = nbytes(type.dtype, math.prod(shape))
