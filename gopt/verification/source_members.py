"""The members of a source with calls along axes of the same samples: run side by side, on equal values.

One rank can stand for all if calls give every member the same. Otherwise members run together, a thread each, and must
agree in their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gopt.collectives.table import COLLECTIVES
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.records.mesh import Mesh
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.engines.threads import run_ranks
from gopt.runtime.executor import EarlyResults, HeldInput
from gopt.verification.reference_graphs import refuse_call

Values = dict[str, np.ndarray]
Feeds = dict[str, Any]
"""Values for inputs, or what a program holds of them (``Executor.hold``)."""
EQUAL = ("AllReduce", "Reduce", "Broadcast", "AllGather")
"""Calls that give the same to members that hold the same."""
MOST = 64
"""Members that run side by side."""


class Program(Protocol):
    """A program of one graph: an Executor, or a float64 program."""

    graph: Graph

    @property
    def early_inputs(self) -> list[str]: ...

    def hold(self, feeds: Values, /) -> Mapping[str, HeldInput]: ...

    def run(self, feeds: Feeds, call: CollectiveCallback, early: EarlyResults | None = None, /) -> Values: ...


def member_mesh(mesh: Mesh, nodes: Iterable[Node]) -> Mesh | None:
    """The axes of the same samples in calls of a source, or None."""
    groups = {str(node.attributes["group"]) for node in nodes if node.domain == COMM and "group" in node.attributes}
    axes = {axis for group in groups for axis in mesh.split(group)} - set(mesh.data_axes)
    sizes = tuple((name, size) for name, size in mesh.axes if name in axes)
    return (
        Mesh(sizes, tuple((name, mesh.kind(name)) for name, _ in sizes if name in dict(mesh.kinds))) if sizes else None
    )


def run_members(program: Program, feeds: Sequence[Feeds], members: Mesh) -> list[Values]:
    """Run every member on the member's own feeds; ``members``: the axes of the source's calls."""
    return run_ranks([program for _ in feeds], [read_by(program, values) for values in feeds], members)


def read_by(program: Program, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are inputs of a program."""
    return {name: values[name] for name in program.graph.inputs if name in values}


@dataclass(frozen=True, slots=True)
class SourceMembers:
    """Answers the source's own calls, for members with equal values.

    Raises UnsupportedError for a call over axes with different data."""

    mesh: Mesh

    def __call__(self, index: int, node: Node, inputs: list[np.ndarray]) -> list[np.ndarray]:
        group = str(node.attributes["group"])
        if any(axis in self.mesh.data_axes for axis in self.mesh.live(group)) or node.op_type not in EQUAL:
            return refuse_call(index, node, inputs)
        if node.op_type == "Broadcast":
            return [array.copy() for array in inputs]
        size = self.mesh.size(group)
        dtype = str(inputs[0].dtype)
        results = COLLECTIVES[node.op_type].execute(node.attributes, [inputs] * size, dtype)
        root = int(node.attributes.get("root", 0))
        return results[root] or []

    def run(self, program: Program, feeds: Feeds) -> Values:
        """Run a part of the source: alone, or beside its like if a call gives each member another part.

        Raises UnsupportedError for members with an equal start and unequal results."""
        apart = [n for n in program.graph.nodes if n.domain == COMM and n.op_type in ("ReduceScatter", "AllToAll")]
        members = member_mesh(self.mesh, program.graph.nodes) if apart else None
        if members is None or any(axis in self.mesh.data_axes for node in apart for axis in _axes(node)):
            return program.run(feeds, self)
        if members.ranks > MOST:
            raise UnsupportedError(
                f"{apart[0].op_type} {apart[0].label!r} gives each of {members.ranks} members another part",
                f"verify on a mesh of at most {MOST} members",
            )
        return _alike(run_members(program, [feeds] * members.ranks, members), apart[0])


def run_source(program: Program, values: Mapping[str, Any], call: CollectiveCallback) -> Values:
    """Run a part of the source on the values read by it; ``call`` answers the part's collectives."""
    feeds = read_by(program, values)
    return call.run(program, feeds) if isinstance(call, SourceMembers) else program.run(feeds, call)


def _axes(node: Node) -> list[str]:
    return str(node.attributes["group"]).split("+")


def _alike(results: Sequence[Values], call: Node) -> Values:
    for name, value in results[0].items():
        if not all(np.array_equal(value, member[name], equal_nan=value.dtype.kind == "f") for member in results[1:]):
            raise UnsupportedError(
                f"{name!r} differs among members that start equal: {call.op_type} {call.label!r} over "
                f"{call.attributes['group']} gives each another part, and one rank cannot stand for all",
                "check that --group-type names the axes of its group",
            )
    return results[0]
