"""Memory of a rank between steps and at the peak of a step, from the rank-independent graph alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.collectives.layout import ITEM_BYTES
from gopt.ir.graph import Node
from gopt.ir.types import nbytes
from gopt.operators.kinds import VIEWS
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.spmd.traffic import CallContent, CollectiveCall, calls_of

SHARES_MEMORY = VIEWS | {"Select"}
"""Operators whose result can share its operand's memory."""
SOURCE_PEAKS = "peaks of live bytes"
"""The question of ``TrainingGraph.once``."""


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
    """The coordinates of a rank for each part of the states: parts along other axes are of the same size."""
    axis, start = program.mesh.shard_axis, program.mesh.coordinates(0)
    coords = [start | dict(part) for variant in program.variants for part in variant.places[:1]] or [start]
    return [at | {axis: member} for at in coords for member in range(program.mesh.size(axis))] if axis else coords


def held(program: SpmdProgram) -> dict[str, list[int]]:
    """Bytes of parameters (with low-precision copies) and optimizer states on each of ``members``."""
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
    calls = {id(variant): calls_of(variant) for variant in program.variants}
    result = []
    for coordinates in members(program):
        variant, total = program.at(coordinates), 0
        for call in calls[id(variant)]:
            if call.carries is CallContent.GRADIENTS and any(name in local for name in call.node.inputs):
                cuts, member = call.node.attributes.get("cuts"), coordinates.get(program.mesh.shard_axis, 0)
                item = ITEM_BYTES[variant.graph.types[call.node.outputs[0]].dtype]
                total += round((cuts[member + 1] - cuts[member]) * item if cuts else call.payload * (1 - call.beside))
        result.append(total)
    return result


def live(program: SpmdProgram, calls: Sequence[CollectiveCall], coordinates: Mapping[str, int]) -> LivePeaks:
    """Peaks of live bytes on a rank beside states, inputs and constants, in node order. A new state replaces the old
    state."""
    nodes = [node for node in program.graph.nodes if node.sharding.covers(coordinates)]
    outputs = (state.output for state in program.states)
    return _peaks(nodes, LocalSizes.at(program, coordinates), frozenset(outputs), _kinds(program, calls))


def live_in_source(training: TrainingGraph) -> LivePeaks:
    """The same for the whole source: nothing is gathered, and gradients are the parameters'."""

    def find() -> LivePeaks:
        kinds = dict.fromkeys(training.gradients.values(), "gradients")
        updated = frozenset(state.updated for state in training.states)
        return _peaks(training.graph.nodes, LocalSizes(training.graph), updated, kinds)

    return training.once(SOURCE_PEAKS, find)


def _peaks(nodes: Sequence[Node], sizes: LocalSizes, updated: frozenset[str], kinds: Mapping[str, str]) -> LivePeaks:
    """Find the peaks of live bytes in a sweep from the last node to the first.

    A value is live from the producer to the last reader; without a reader, to the end. ``updated``: new states, not
    counted.
    """

    def size_of(name: str) -> int:
        return 0 if name in updated else sizes.nbytes(name)

    views = {node.outputs[0]: node.inputs[0] for node in nodes if node.op_type in SHARES_MEMORY and node.inputs[0]}
    root: dict[str, str] = {}
    for name, base in views.items():
        root[name] = root.get(base, base)
    results = {name for node in nodes for name in node.outputs}
    read = {name for node in nodes for name in node.reads}
    now = dict.fromkeys(("gradients", "gathered", "activations"), 0)
    live = {name: size_of(name) for name in results - read - root.keys()}
    """Value that is alive -> its bytes."""
    for name, size in live.items():
        now[kinds.get(name, "activations")] += size
    peak, alive = dict(now), sum(now.values())
    most = alive
    for node in reversed(nodes):
        for name in node.reads:
            name = root.get(name, name)
            if name not in live and name in results:  # another rank may make it
                size = live[name] = size_of(name)
                if size:
                    kind = kinds.get(name, "activations")
                    alive += size
                    now[kind] += size
                    if now[kind] > peak[kind]:
                        peak[kind] = now[kind]
        if alive > most:
            most = alive
        for name in node.outputs:
            if size := live.get(name, 0):
                alive -= size
                now[kinds.get(name, "activations")] -= size
    return LivePeaks(most, peak["activations"], peak["gradients"], peak["gathered"])


def _kinds(program: SpmdProgram, calls: Sequence[CollectiveCall]) -> dict[str, str]:
    kinds = dict.fromkeys(program.training.gradients.values(), "gradients")
    for call in calls:
        if call.before_use or call.carries is CallContent.GRADIENTS:
            kinds.update(dict.fromkeys(call.node.outputs, "gathered" if call.before_use else "gradients"))
    return kinds
