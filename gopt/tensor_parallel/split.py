"""Splits a step along one axis after the other, and checks it along all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Graph
from gopt.records.placements import PARTS, Placement, Sharding
from gopt.tensor_parallel.axes import AxisSplit
from gopt.tensor_parallel.check import Checker, check, check_together
from gopt.tensor_parallel.marks import Marks
from gopt.tensor_parallel.other_axes import OtherAxes
from gopt.tensor_parallel.propagate import propagate
from gopt.tensor_parallel.propagated import Propagated


@dataclass(frozen=True, slots=True)
class TensorParallelStep:
    """A step in logical types, with the mappings of all axes as nodes. ``shardings``: of values with sharded
    dimensions; ``along``: the result of propagation, by axis."""

    graph: Graph
    shardings: dict[str, Sharding]
    along: list[Propagated]


def split_step(
    training: TrainingGraph, splits: Sequence[AxisSplit], marks: Marks | None = None, *, regather: bool = False
) -> TensorParallelStep:
    """Split a step and check it against the rules along every axis. ``marks``: the user's statements on gradients;
    ``regather``: each phase gathers what it reads.

    Raises UnsupportedError where two axes do not compose, InvariantError where the result breaks a rule.
    """
    graph = training.graph.copy()
    axes = frozenset(split.axis for split in splits)
    checkers: list[Checker] = []
    along = []
    for split in splits:
        axes_so_far = OtherAxes(graph, tuple(checkers))
        propagated = propagate(
            training, graph, split.axis, split.members, split.seeds, split.tokens, axes_so_far, split.cut, split.cost,
            regather=regather,
        )  # fmt: skip
        if marks is not None and (count := marks.settle(graph, split.axis, propagated.placements)):
            propagated.conversions["mean as marked"] = count
        along.append(replace(propagated, graph=replace(graph, types=dict(graph.types))))
        checkers.append(Checker(graph, split.axis, axes, dict(propagated.placements)))
    placements = {split.axis: check(training, graph, split.axis, split.seeds, axes) for split in splits}
    check_together(placements)
    shards: dict[str, list[tuple[str, Placement]]] = {}
    for axis, placed in placements.items():
        for name, placement in placed.items():
            if isinstance(placement, PARTS):
                shards.setdefault(name, []).append((axis, placement))
    return TensorParallelStep(graph, {name: Sharding(tuple(parts)) for name, parts in shards.items()}, along)
