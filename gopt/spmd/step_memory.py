"""Memory of a rank between steps and at the peak of a step, from the rank-independent graph alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.collectives.layout import ITEM_BYTES
from gopt.ir.types import nbytes
from gopt.records.mesh import PIPELINE
from gopt.records.placements import Sharding
from gopt.spmd.liveness import LivePeaks as LivePeaks
from gopt.spmd.liveness import Sizes, peaks
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.spmd.schedule_memory import StepRun, on_rank, scheduled
from gopt.spmd.traffic import CallContent, CollectiveCall, calls_of
from gopt.spmd.verifier import shardings_so_far
from gopt.text.amounts import balance as one_balance

SOURCE_PEAKS = "peaks of live bytes"
"""The question of ``TrainingGraph.once``."""


def members(program: SpmdProgram) -> list[dict[str, int]]:
    """The coordinates of a rank for each part of the states, on each stage: parts along other axes are of the same
    size."""
    axis, start = program.mesh.shard_axis, program.mesh.coordinates(0)
    coords = [start | dict(part) for variant in program.variants for part in variant.places[:1]] or [start]
    if program.stages is not None:
        coords = [at | {PIPELINE: member} for member in range(program.mesh.size(PIPELINE)) for at in coords]
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


def balance(rows: Mapping[str, Sequence[int]]) -> float:
    """The largest max / mean of the kinds; 1 when nothing is held."""
    return max((one_balance(row) for row in rows.values()), default=1.0)


def live(program: SpmdProgram, calls: Sequence[CollectiveCall], coordinates: Mapping[str, int]) -> LivePeaks:
    """Peaks of live bytes on a rank beside states, inputs and constants, in node order, or in the order of a schedule
    with the sums of micro-batches. A new state replaces the old state."""
    return step_run(program, calls, coordinates).peaks


def stage_runs(program: SpmdProgram) -> list[StepRun]:
    """The memory of a step on each stage's member: of the first rank there, since others differ in states alone."""
    start, calls = program.mesh.coordinates(0), calls_of(program)
    return [step_run(program, calls, start | {PIPELINE: at}) for at in range(program.mesh.size(PIPELINE))]


def step_run(program: SpmdProgram, calls: Sequence[CollectiveCall], coordinates: Mapping[str, int]) -> StepRun:
    """The same peaks, and the bytes that a schedule saves between its actions."""
    outputs = [state.output for state in program.states]
    plan, kinds, parts = program.stages, _kinds(program, calls), _parts(program)
    if plan is not None and plan.schedule is not None:
        outputs += [name for item in program.accumulators for name in (item.added, item.output)]
        sizes = Sizes(program.graph, outputs, parts, coordinates)
        return scheduled(program, plan, plan.schedule, sizes, kinds, coordinates)
    sizes = Sizes(program.graph, outputs, parts, coordinates)
    return StepRun(peaks(on_rank(program.graph.nodes, coordinates), sizes, kinds))


def live_in_source(training: TrainingGraph) -> LivePeaks:
    """The same for the whole source: nothing is gathered, and gradients are the parameters'."""

    def find() -> LivePeaks:
        kinds = dict.fromkeys(training.gradients.values(), "gradients")
        return peaks(training.graph.nodes, Sizes(training.graph, (s.updated for s in training.states)), kinds)

    return training.once(SOURCE_PEAKS, find)


def _parts(program: SpmdProgram) -> Mapping[str, Sharding]:
    """Return the shardings of values held in parts. A verified program has them, except for windows along axes of a
    split computation."""
    if program.sharded and not program.split:
        return program.sharded
    shardings = shardings_so_far(program)
    return {name: shardings.sharding(name) for name in shardings.known}


def _kinds(program: SpmdProgram, calls: Sequence[CollectiveCall]) -> dict[str, str]:
    kinds = dict.fromkeys(program.training.gradients.values(), "gradients")
    for call in calls:
        if call.before_use or call.carries is CallContent.GRADIENTS:
            kinds.update(dict.fromkeys(call.node.outputs, "gathered" if call.before_use else "gradients"))
    return kinds
