"""Steps and servers for tests of asynchronous modes, and updates of the source that gopt's splitting has no part in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from helpers import Builder, perceptron, run_graph
from onnx import TensorProto, helper

from gopt import api
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.manifest_entries import InputKind
from gopt.artifact.server_entries import Mode, ServerPlanEntry
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.parameter_server.blocks import Block, find_blocks
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.session import Array, SessionCache

MILESTONE = 2
"""Steps after which the rate of ``scheduled`` falls."""


def scheduled(path: Path) -> Path:
    """Momentum with value clip and decay, and a rate that a step counter chooses with an If."""
    b = Builder(seed=3)
    net = perceptron(b, widths=(3, 5, 2))
    step = b.state("step", np.zeros((), np.float32))
    b.output("loss", net.loss, ())

    def branch(name: str, rate: float) -> object:
        value = helper.make_tensor("", TensorProto.FLOAT, (), [rate])
        made = helper.make_tensor_value_info(name, TensorProto.FLOAT, ())
        return helper.make_graph([helper.make_node("Constant", [], [name], value=value)], name, [], [made])

    early = b.op("Less", step, b.const(float(MILESTONE)))
    rate = b.op("If", early, then_branch=branch("warm", 0.2), else_branch=branch("late", 0.05))
    for name, shape in net.params.items():
        clipped = b.op("Clip", net.gradients[name], b.const(-0.1), b.const(0.1))
        decayed = b.op("Add", clipped, b.op("Mul", b.const(0.01), name))
        held = b.small(f"{name}_m", shape)
        moved = b.op("Add", b.op("Mul", held, b.const(0.9)), decayed)
        b.output(f"{name}_m_out", moved, shape)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", rate, moved)), shape)
    b.output("step_out", b.op("Add", step, b.const(1.0)), ())
    return b.save(path)


@dataclass
class Served:
    """The servers of a written split."""

    training: TrainingGraph
    plan: ServerPlanEntry
    servers: list[tuple[Graph, dict[str, str], list[Block]]]
    """Of each server its graph, its states, and its blocks."""

    def values(self) -> list[dict[str, Array]]:
        """The states of every server at the start."""
        return [
            {name: np.array(graph.initializers[name].numpy()) for name in states} for graph, states, _ in self.servers
        ]


def served(model: Path, folder: Path, **given: object) -> Served:
    """Split a step for asynchronous servers, and read what was written."""
    source = api.load(model)
    options = SplitOptions(**{"trainers": 2, "servers": 2, "minimum": 4, "mode": Mode.ASYNC, **given})  # type: ignore[arg-type]
    api.split(source, options).write(folder)
    manifest, _ = read_manifest(folder)
    hyper = [each.name for each in manifest.inputs_of(InputKind.HYPER)]
    plan = manifest.parameter_server
    assert plan is not None
    found = []
    for number in range(plan.servers):
        graph = load(folder / f"server_{number:04d}.onnx", own=True)
        states = {each.input: each.output for each in manifest.ranks[options.trainers + number].state}
        found.append((graph, states, find_blocks(graph, plan, number, states, hyper)))
    return Served(source.training, plan, found)


class SourceUpdate:
    """The update of a source, cut behind its gradients: whole tensors, one round after the other."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training, graph = training, training.graph
        self.states = {state.tensor: state.updated for state in training.states}
        producers, kept = graph.producers(), set[int]()
        cut = set(training.gradients.values())
        stack = list(self.states.values())
        while stack:
            node = producers.get(name := stack.pop())
            if name not in cut and node is not None and id(node) not in kept:
                kept.add(id(node))
                stack += node.reads
        nodes = [node for node in graph.nodes if id(node) in kept]
        inputs = {name: graph.types[name] for name in (*self.states, *cut, *training.hyper)}
        outputs = {name: graph.types[name] for name in self.states.values()}
        constants = {name: tensor for name, tensor in graph.initializers.items() if name not in inputs}
        self.graph = Graph("update", nodes, inputs, outputs, constants, graph.types, graph.header)
        self.cache = SessionCache()

    def start(self) -> dict[str, Array]:
        return {name: np.array(self.training.graph.initializers[name].numpy()) for name in self.states}

    def __call__(
        self, states: Mapping[str, Array], gradients: Mapping[str, Array], hyper: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """The next states. ``gradients``: by parameter."""
        fed = {value: gradients[name] for name, value in self.training.gradients.items()}
        made = run_graph(self.graph, {**states, **fed, **(hyper or {})}, self.cache)
        return {name: made[new] for name, new in self.states.items()}

    def gradients(self, generator: np.random.Generator) -> dict[str, Array]:
        """Some gradients, by parameter."""
        types = self.training.graph.types
        return {
            name: generator.standard_normal(types[name].dims).astype(np.float32) for name in self.training.gradients
        }
