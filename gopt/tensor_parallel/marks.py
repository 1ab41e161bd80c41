"""Marks: the user's statement over which axes a gradient is shared, ``*.norm.weight:tp+cp;head:none``.

Whether a gradient is a partial sum along an axis follows from the step alone, so a mark changes no value. A mark that
agrees with the step changes nothing. A mark with an axis along which the gradient is equal on all members adds a mean
over the axis: the value stays, and members with drifted bits agree again. A mark is refused without an axis along
which the gradient is a partial sum, or with an axis along which members hold different parts of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.operators.kinds import CARRIES
from gopt.records.mesh import AxisKind, Mesh
from gopt.records.placements import REPLICATED, Placement, Shard
from gopt.tensor_parallel.builder import PASS
from gopt.tensor_parallel.patterns import Pattern, matches

NONE = "none"


def parse_marks(text: str) -> tuple[Pattern, ...]:
    """``*.norm.weight:tp+cp;head:none``; raises OptionError on anything else."""
    patterns = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        glob, colon, group = part.rpartition(":")
        if not colon or not glob or not all(axis.isidentifier() for axis in group.split("+")):
            raise OptionError(
                f"tensor-parallel: cannot read {part!r} as a mark of gradients",
                "write PATTERN:AXES with axes of the mesh that split the computation, such as tp or tp+cp, or none",
            )
        patterns.append(Pattern(glob, group))
    return tuple(patterns)


@dataclass(slots=True)
class Marks:
    """The marked gradients. ``axes``: value -> the axes over which the user says it is shared; ``of``: value -> its
    parameter, for messages; ``warnings``: marks that the step contradicts, and what was done."""

    axes: dict[str, frozenset[str]] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, training: TrainingGraph, mesh: Mesh, axes: Sequence[str], patterns: tuple[Pattern, ...]) -> Marks:
        """Read marks; ``axes``: those that split the computation. Raises OptionError for a mark fitting no parameter,
        for an unknown axis, and for parameters with a common gradient that have different marks."""
        marks = cls()
        parameters = [state.tensor for state in training.parameters if state.tensor in training.gradients]
        groups = {pattern: _axes(pattern, mesh, axes) for pattern in patterns}
        for name, pattern in matches(parameters, patterns, "parameter"):
            value = training.gradients[name]
            if marks.axes.setdefault(value, groups[pattern]) != groups[pattern]:
                raise OptionError(
                    f"tensor-parallel: {marks.of[value]!r} and {name!r} have one gradient, and are not marked alike",
                    "give both the same mark",
                )
            marks.of.setdefault(value, name)
        return marks

    def settle(self, graph: Graph, axis: str, placements: Mapping[str, Placement]) -> int:
        """Check the marks against a step that is split along an axis, and add the means that they ask for.
        ``placements``: of the values of ``graph`` along the axis. Returns the number of means.

        Raises UnsupportedError for a mark that would change the step's result.
        """
        if not self.axes:
            return 0
        producers = graph.producers()
        added: dict[int, Node] = {}
        for value, axes in self.axes.items():
            summed, marked = _summed(value, axis, producers), axis in axes
            if summed == marked:
                continue
            what = f"the gradient of {self.of[value]!r}"
            if summed:
                raise UnsupportedError(
                    f"{what} is marked as not shared over {axis}, and is a partial sum along {axis}: without the sum "
                    "members would go on with their own terms",
                    f"add {axis} to the mark, or leave the mark out",
                )
            if isinstance(placements.get(value, REPLICATED), Shard):
                if marked:
                    raise UnsupportedError(
                        f"{what} is marked as shared over {axis}, and is {placements[value]} along it: members have "
                        "other elements of the parameter",
                        f"leave {axis} out of the mark",
                    )
                continue
            self.warnings.append(
                f"{what} is marked as shared over {axis}, but the step computes it equal on all members of {axis}: its "
                f"mean is taken over {axis}, which changes no value; a sum would multiply it"
            )
            mean = _mean(graph, value, axis, producers[value])
            added[id(producers[value])] = mean
            producers[value] = mean
        if added:
            graph.nodes = [new for node in graph.nodes for new in (node, added.get(id(node))) if new is not None]
        return len(added)


def _axes(pattern: Pattern, mesh: Mesh, splitting: Sequence[str]) -> frozenset[str]:
    if pattern.word == NONE:
        return frozenset()
    axes = mesh.split(pattern.word)
    for axis in axes:
        if mesh.kind(axis) is AxisKind.DATA:
            raise OptionError(
                f"tensor-parallel: the mark {pattern} names {axis}, along which ranks see samples of their own",
                "every gradient is averaged over such axes: leave it out",
            )
        if axis not in splitting and axis in mesh.live(pattern.word):
            raise OptionError(
                f"tensor-parallel: the mark {pattern} names {axis}, which does not split the computation",
                "name an axis such as tp, ep, cp or sp that the mesh has",
            )
    return frozenset(axes)


def _summed(value: str, axis: str, producers: Mapping[str, Node]) -> bool:
    """Return whether a value comes from a call over the axis, directly or through moves and casts."""
    while (node := producers.get(value)) is not None:
        if node.domain == COMM:
            group = str(node.attributes["group"])
            if group == axis and node.op_type in ("AllReduce", "ReduceScatter"):
                return True
            if group == axis or node.op_type != "AllReduce":
                return False
        elif not node.is_in(CARRIES):
            return False
        value = node.inputs[0]
    return False


def _mean(graph: Graph, value: str, axis: str, producer: Node) -> Node:
    """Replace a value by the mean over an axis."""
    local = f"gopt.{PASS}.{value}.{axis}.own"
    graph.types[local] = graph.types[value]
    producer.outputs = [local if name == value else name for name in producer.outputs]
    mean = Node("AllReduce", [local], [value], domain=COMM, attributes={"group": axis, "reduce": "mean"}, made_by=PASS)
    mean.phase = producer.phase
    return mean
