"""Memory of a rank between steps and at the peak of a step, from the rank-independent graph alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.collectives.layout import ITEM_BYTES
from gopt.ir.types import nbytes
from gopt.records.mesh import PIPELINE
from gopt.spmd.host_memory import on_device
from gopt.spmd.liveness import SHARES_MEMORY as SHARES_MEMORY
from gopt.spmd.liveness import LivePeaks as LivePeaks
from gopt.spmd.liveness import peaks
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.spmd.schedule_memory import StepRun, on_rank, scheduled
from gopt.spmd.stage_actions import with_common
from gopt.spmd.traffic import CallContent, CollectiveCall, Overlap, calls_of, measure

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


def accumulated(program: SpmdProgram, coordinates: Mapping[str, int]) -> int:
    """Bytes of the sums over micro-steps on a rank."""
    sums = [item for item in program.at(coordinates).accumulators if item.present(coordinates)]
    return sum(item.local_type(coordinates).nbytes for item in sums if item.type.static)


def held(program: SpmdProgram) -> dict[str, list[int]]:
    """Bytes of parameters (with low-precision copies) and optimizer states on each of ``members``, without those in
    the memory of the host."""
    kinds = {state.tensor: state.kind for state in program.training.states}
    ranks, hosted = members(program), set(program.host.states)
    result = {"parameters": [0] * len(ranks), "optimizer_states": [0] * len(ranks)}
    for number, coordinates in enumerate(ranks):
        for state in program.at(coordinates).states:
            kind = None if state.input in hosted else kinds[state.slices[0].tensor]
            if kind is StateKind.PARAMETER:
                result["parameters"][number] += _state_bytes(state, coordinates)
            elif kind in (StateKind.OPTIMIZER_STATE, StateKind.ACCUMULATOR):
                result["optimizer_states"][number] += _state_bytes(state, coordinates)
    return result


def held_on_host(program: SpmdProgram) -> list[int]:
    """Bytes of states in the memory of the host for each of ``members``."""
    hosted = set(program.host.states)
    return [
        sum(_state_bytes(state, at) for state in program.at(at).states if state.input in hosted)
        for at in members(program)
    ]


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
    """Peaks of live bytes on a rank beside states, inputs and constants, in node order, or in the order of a schedule
    with the sums of micro-batches. A new state replaces the old state."""
    return step_run(program, calls, coordinates).peaks


def stage_runs(program: SpmdProgram) -> list[StepRun]:
    """The memory of a step on each stage's member: of the first rank there, since others differ in states alone."""
    start, calls = program.mesh.coordinates(0), calls_of(program)
    return [step_run(program, calls, start | {PIPELINE: at}) for at in range(program.mesh.size(PIPELINE))]


def overlap_of(program: SpmdProgram) -> Overlap:
    """The overlap of a program's calls. On pipeline stages, the member with most gathered bytes counts, in
    the order of the schedule: each action gathers for itself."""
    overlap = measure(calls_of(program))
    if program.stages is None:
        return overlap
    return replace(overlap, peak_gathered_bytes=max(run.peaks.gathered for run in stage_runs(program)))


def step_run(program: SpmdProgram, calls: Sequence[CollectiveCall], coordinates: Mapping[str, int]) -> StepRun:
    """The same peaks, and the bytes that a schedule saves between its actions."""
    updated = {state.output for state in program.states}
    sizes, kinds = LocalSizes.at(program, coordinates), _kinds(program, calls)
    if program.stages is not None and program.stages.schedule is not None:
        return scheduled(program, program.stages, sizes, updated, kinds, coordinates)
    updated.update(program.loop_carried.values())
    updated.update(name for item in program.accumulators for name in (item.added, item.output))
    parts = program.phase_results() if program.micro_steps > 1 else ({name: name for name in program.results()},)
    runs = []
    for results in (set(part.values()) for part in parts):
        phase = with_common({*results}, program.graph.nodes) if len(parts) > 1 else program.graph.nodes
        nodes, counts = on_device(program, on_rank(phase, coordinates), sizes)
        runs.append(peaks(nodes, counts, updated, kinds, results))
    return StepRun(LivePeaks(*(max(map(field, runs)) for field in map(attrgetter, LivePeaks.__match_args__))))


def live_in_source(training: TrainingGraph) -> LivePeaks:
    """The same for the whole source: nothing is gathered, and gradients are the parameters'."""

    def find() -> LivePeaks:
        kinds = dict.fromkeys(training.gradients.values(), "gradients")
        updated = {state.updated for state in training.states}
        sizes, results = LocalSizes(training.graph), updated.union(training.shown)
        return peaks(training.graph.nodes, sizes, updated, kinds, results)

    return training.once(SOURCE_PEAKS, find)


def _kinds(program: SpmdProgram, calls: Sequence[CollectiveCall]) -> dict[str, str]:
    kinds = dict.fromkeys(program.training.gradients.values(), "gradients")
    for call in calls:
        if call.before_use or call.carries is CallContent.GRADIENTS:
            kinds.update(dict.fromkeys(call.node.outputs, "gathered" if call.before_use else "gradients"))
    return kinds
