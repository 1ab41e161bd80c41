"""The source and the ranks of a verification in float64: without rounding, a difference is an error.

Rounding inside the source's own step is measured too, as the distance from the same forward, backward or update in
float64. A difference of nearly equal sums is mostly rounding, and disturbed operands do not show it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from gopt.ir.types import LOW_PRECISION
from gopt.runtime.float64 import Float64Graph
from gopt.runtime.session import SessionCache
from gopt.runtime.widen import widened
from gopt.verification.all_ranks import AllRanks
from gopt.verification.compare import Values, floating
from gopt.verification.reference_step import ReferenceProgram, ReferenceStep
from gopt.verification.sensitivity import apart
from gopt.verification.source_members import Program


def rounds_inside(reference: ReferenceProgram) -> bool:
    """Return whether the source leaves its roundings open: inputs and gradients in halves are rounded on purpose, also
    on the wire."""
    graph = reference.training.graph
    read = [type.dtype for type in graph.inputs.values()]
    read += [graph.types[name].dtype for name in reference.gradients]
    return LOW_PRECISION.isdisjoint(read)


def wide(values: Mapping[str, np.ndarray]) -> Values:
    """The values with floating numbers in float64."""
    return {
        name: np.asarray(value, np.float64) if floating(np.asarray(value)) else value for name, value in values.items()
    }


def reference_in_float64(reference: ReferenceProgram, cache: SessionCache) -> ReferenceProgram:
    """The same source. Raises RunError or UnsupportedError where nothing runs them."""
    exact = reference.by(lambda program: _in_float64(program, cache))
    exact.pulled = {}
    return exact


def ranks_in_float64(all_ranks: AllRanks, cache: SessionCache) -> AllRanks:
    """The same ranks. Raises RunError or UnsupportedError where nothing runs them."""
    return replace(
        all_ranks,
        ranks=[
            replace(
                rank,
                programs={phase: _in_float64(program, cache) for phase, program in rank.programs.items()},
                first_runs={},
            )
            for rank in all_ranks.ranks
        ],
    )


def _in_float64(program: Program, cache: SessionCache) -> Float64Graph:
    """The program, which is fed all its inputs."""
    graph = program.graph
    constants = {name: tensor for name, tensor in graph.initializers.items() if name not in graph.inputs}
    return Float64Graph(widened(replace(graph, initializers=constants), "float64"), cache)


def local_rounding(step: ReferenceStep, exact: ReferenceStep, statistics: Collection[str]) -> dict[str, float]:
    """Return how far rounding inside forward and backward moves each local gradient, loss and metric, at most in any
    batch, and each of the ``statistics``: the distance of a step of the source from the ``exact`` one in float64."""
    moved = {name: apart(step.states[name], exact.states[name]) for name in statistics}
    ours, theirs = step.local, exact.local
    for results, wanted in ((ours.gradients, theirs.gradients), (ours.outputs, theirs.outputs)):
        for mine, twin in zip(chain(*results), chain(*wanted)):
            for name, value in mine.items():
                moved[name] = max(apart(value, twin[name]), moved.get(name, 0.0))
    return moved


def update_rounding(exact: ReferenceProgram, states: Values, settings: Values, step: ReferenceStep) -> dict[str, float]:
    """Return how far rounding inside the update of a step moves each new state, and each metric: the distance from the
    same update in float64, by ``exact``, of the same gradients."""
    local = replace(
        step.local,
        statistics=[wide(values) for values in step.local.statistics],
        shown=[wide(values) for values in step.local.shown],
        read=[wide(values) for values in step.local.read],
    )
    wanted = exact.finish(wide(states), wide(settings), local, wide(step.means))
    moved = {name: apart(value, wanted.states[name]) for name, value in step.states.items()}
    for mine, theirs in zip(step.metrics, wanted.metrics):
        for name, value in mine.items():
            moved[name] = max(apart(value, theirs[name]), moved.get(name, 0.0))
    return moved
