"""How errors are planted: in rank files, nodes replaced and calls that ask nobody; in a step, by a pass behind all
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import onnx
from helpers import FIXTURES, calls
from onnx import ModelProto, NodeProto, helper

import gopt
from gopt.api import Sharded
from gopt.ir.graph import Graph, Node
from gopt.passes.base import Pass
from gopt.passes.pipeline import PassInstance, Pipeline, build_pipeline
from gopt.records.mesh import Mesh
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram

# --- rank files -------------------------------------------------------------------------------------------------------


def replace(model: ModelProto, node: NodeProto, new: list[NodeProto]) -> None:
    """Put other nodes where a node stood."""
    nodes = list(model.graph.node)
    place = next(place for place, each in enumerate(nodes) if each is node or each == node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *new, *nodes[place + 1 :]])


def attribute(node: NodeProto, name: str) -> onnx.AttributeProto:
    return next(each for each in node.attribute if each.name == name)


def gradient_calls(model: ModelProto) -> list[NodeProto]:
    """Calls that average gradients (a scalar call is a sum, a statistic's call stands in its own pass)."""
    return [
        node for node in calls(model, "AllReduce", "ReduceScatter")
        if attribute(node, "reduce").s == b"mean" and not any("statistics" in name for name in node.input)
    ]  # fmt: skip


def own_values(node: NodeProto, rank: int) -> list[NodeProto]:
    """What a call would give if it asked nobody: the rank's own part of its own gradients."""
    if node.op_type == "AllReduce":
        return [helper.make_node("Identity", [old], [new]) for old, new in zip(node.input, node.output)]
    cuts = list(attribute(node, "cuts").ints)
    tag = f"planted.{node.output[0]}"

    def const(role: str, value: int) -> NodeProto:
        return helper.make_node("Constant", [], [f"{tag}.{role}"], value_ints=[value])

    parts = [
        helper.make_node("Reshape", [name, f"{tag}.flat"], [f"{tag}.{place}"]) for place, name in enumerate(node.input)
    ]
    return [
        const("flat", -1), const("start", cuts[rank]), const("stop", cuts[rank + 1]), *parts,
        helper.make_node("Concat", [part.output[0] for part in parts], [f"{tag}.all"], axis=0),
        helper.make_node("Slice", [f"{tag}.all", f"{tag}.start", f"{tag}.stop"], list(node.output)),
    ]  # fmt: skip


# --- steps of all ranks -----------------------------------------------------------------------------------------------


class HasGraph(Protocol):
    """A program, or a step that was split."""

    @property
    def graph(self) -> Graph: ...


Plant = Callable[[SpmdProgram], object]
"""Does one thing wrong."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Nothing to choose."""


def planted_pass(plant: Plant, name: str = "plant") -> PassInstance:
    """A pass that plants an error."""

    def apply(program: SpmdProgram, _: Options) -> PassResult:
        """Plant an error."""
        for node in program.graph.nodes:  # a plant may edit lists of names, which nodes share with those of the source
            node.inputs, node.outputs = [*node.inputs], [*node.outputs]
        plant(program)
        return PassResult()

    return PassInstance(Pass(name, Options, apply), Options())


def planted_pipeline(
    plant: Plant, stage: int, *, split: Mapping[str, object] | None = None, **options: object
) -> Pipeline:
    """The default pipeline, ``shard`` with these options and ``tensor-parallel`` with those of ``split``, and a pass
    behind it that plants an error."""
    default = build_pipeline(defaults={"shard": {"stage": stage, **options}, "tensor-parallel": dict(split or {})})
    return Pipeline((*default.stages, planted_pass(plant)))


@dataclass(frozen=True)
class Case:
    """An error, the fixture, mesh and stage where it is planted, and what the refusal must say.

    ``runs``: whether ranks can run with it; ``split``, ``options``: of the passes ``tensor-parallel`` and ``shard``.
    """

    plant: Plant
    name: str
    mesh: str
    stage: int
    match: str
    micro_steps: int = 1
    runs: bool = True
    split: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        steps = f"-x{self.micro_steps}" if self.micro_steps > 1 else ""
        return f"{self.plant.__name__}-{self.name}-{self.mesh}-{self.stage}{steps}"

    def shard(self) -> Sharded:
        """Shard the fixture with the error; raises what the checks find."""
        pipeline = planted_pipeline(self.plant, self.stage, split=self.split, **self.options)
        source = gopt.load(FIXTURES / f"{self.name}.onnx")
        return gopt.shard(source, Mesh.parse(self.mesh), accumulate=self.micro_steps, pipeline=pipeline, prove=False)


def substitute(program: HasGraph, old: Node, new: list[Node]) -> None:
    """Put other nodes where a node of a step stood."""
    place = next(place for place, node in enumerate(program.graph.nodes) if node is old)
    program.graph.nodes[place : place + 1] = new


def hand_on(program: SpmdProgram, node: Node) -> None:
    """Let a call give what it was given."""
    pairs = zip(node.inputs, node.outputs)
    substitute(
        program, node, [Node("Identity", [old], [new], sharding=node.sharding, made_by="plant") for old, new in pairs]
    )


def change_attributes(program: HasGraph, node: Node, **changes: object) -> None:
    """The same node with other attributes; nodes may share theirs, so a new one stands in its place."""
    attributes = {**node.attributes, **changes}
    other = Node(
        node.op_type, node.inputs, node.outputs, domain=node.domain, name=node.name, attributes=attributes,
        made_by=node.made_by, sharding=node.sharding,
    )  # fmt: skip
    other.phase, other.origin = node.phase, node.origin
    substitute(program, node, [other])
