"""Steps on images that are split by rows or columns, all members in one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from helpers import source
from members import Array, joined, run, simulated

from gopt.analysis.training import TrainingGraph
from gopt.ir.types import numpy_dtype
from gopt.records.placements import REPLICATED, Placement, Shard
from gopt.tensor_parallel.check import check
from gopt.tensor_parallel.propagate import propagate
from gopt.tensor_parallel.propagated import Propagated


@dataclass(frozen=True)
class Images:
    """A step whose batch input is split, and what propagation made of it."""

    training: TrainingGraph
    seeds: dict[str, Placement]
    made: Propagated

    @property
    def kinds(self) -> list[str]:
        return [node.op_type for node in self.made.graph.nodes]


def by_places(name: str, shard: Shard, value: str = "x") -> Images:
    training = source(name).training
    seeds: dict[str, Placement] = {value: shard}
    made = propagate(training, training.graph.copy(), "tp", len(shard.sizes), seeds)
    check(training, made.graph, "tp", seeds)
    return Images(training, seeds, made)


def drawn(training: TrainingGraph) -> dict[str, Array]:
    """Values of all inputs."""
    generator, graph = np.random.default_rng(3), training.graph
    found = {}
    for name, type in graph.inputs.items():
        if name in graph.initializers:
            found[name] = graph.initializers[name].numpy()
        elif type.dtype.startswith("int"):
            found[name] = generator.integers(0, 2, type.dims).astype(type.dtype)
        else:
            found[name] = np.asarray(0.4 * generator.standard_normal(type.dims) + 0.3).astype(numpy_dtype(type.dtype))
    return found


def largest_error(step: Images) -> float:
    """How far any member's part of any result is from the whole, in parts of the change of a state."""
    training, graph = step.training, step.training.graph
    values, names = drawn(training), list(graph.outputs)
    held = {name: each.numpy() for name, each in graph.initializers.items()}
    whole = run(graph.nodes, {**held, **values}, names, graph.header.opset_import[0].version)
    members = len(next(iter(step.seeds.values())).sizes)  # type: ignore[union-attr]
    placed = {**step.seeds, **step.made.placements}
    made = simulated(step.made.graph, placed, values, members)
    before = {state.updated: values[state.tensor] for state in training.states}
    worst = 0.0
    for name, expected in zip(names, whole):
        change = np.linalg.norm(expected.astype("f8") - before.get(name, np.zeros(())).astype("f8"))
        parts = made[name] if placed.get(name, REPLICATED) == REPLICATED else [joined(made[name], placed[name])]
        for each in parts:
            worst = max(worst, float(np.linalg.norm(each.astype("f8") - expected.astype("f8")) / (change + 1e-6)))
    return worst
