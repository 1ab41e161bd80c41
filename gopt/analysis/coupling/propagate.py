"""One sweep over the nodes of a step, in order: every value gets its mark, and couplings are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.contract import statistics
from gopt.analysis.coupling.marks import DRAWN, REDUCED, UNKNOWN, CouplingKind, Mark, Marks, Relation, Untraceable
from gopt.analysis.coupling.reduced import reduced
from gopt.analysis.coupling.transfer_functions import RULES, by_dims
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.node_kinds import control_flow, random, value_reads

UNDECIDED = "gopt cannot tell whether it is the step of one large batch"


def start(graph: Graph, batch: Sequence[str]) -> CouplingContext:
    """The batch inputs marked: their dimension 0 counts the samples."""
    shapes = {name: graph.inputs[name].shape for name in batch}
    fronts = Counter(shape[0] for shape in shapes.values() if shape)
    size = fronts.most_common(1)[0][0] if fronts else None
    context = CouplingContext(GraphIndex(graph), size if isinstance(size, int) else 0)
    for name, shape in shapes.items():
        if shape and shape[0] == size:
            context.marks[name] = Mark(Relation.SAMPLES)
            continue
        context.marks[name] = UNKNOWN
        has = f"{shape[0]} rows where other inputs have {size}" if shape else "no dimension of samples"
        where = context.index.users.get(name, ())
        if where:
            context.couple(
                CouplingKind.UNKNOWN, where[0], f"batch input {name!r} has {has}: {UNDECIDED}",
                "give every batch input one row for every sample", name,
            )  # fmt: skip
    return context


def propagate(context: CouplingContext, nodes: Iterable[Node]) -> None:
    """Set the marks of the results of ``nodes``, which must be in topological order."""
    for node in nodes:
        marks = [context.marks[name] for name in value_reads(node) if name in context.marks]
        if not marks:
            if random(node):
                _set(context, node, [DRAWN for _ in node.outputs])
            continue
        if any(mark.kind is Relation.UNKNOWN for mark in marks):
            _set(context, node, [UNKNOWN for _ in node.outputs])
            continue
        try:
            _set(context, node, _visit(context, node, marks))
        except Untraceable as lost:
            context.couple(
                CouplingKind.UNKNOWN, node,
                f"the samples cannot be followed past {node.label!r} ({node.op_type}): {lost}; {UNDECIDED}",
            )  # fmt: skip
            _set(context, node, [UNKNOWN for _ in node.outputs])


def _visit(context: CouplingContext, node: Node, marks: list[Mark]) -> Marks:
    if control_flow(node) or node.captures:
        raise Untraceable("gopt does not look into control flow")
    if node.domain == COMM:
        return [context.marks.get(name) for name in node.inputs][: len(node.outputs)]
    if node.domain not in ("", "ai.onnx"):
        raise Untraceable("gopt has no rule for this operator")
    if all(mark.kind in REDUCED for mark in marks):
        made = reduced(context, node)
        return [made for _ in node.outputs]
    for name in dict.fromkeys(value_reads(node)):
        mark = context.marks.get(name)
        if mark is not None and mark.kind in REDUCED:
            _feed(context, node, name, mark)
    return RULES.get(node.op_type, by_dims)(context, node)


def _feed(context: CouplingContext, node: Node, name: str, mark: Mark) -> None:
    """Record a value reduced over samples that a node of single samples reads: a statistic unless they are mixed."""
    context.fed.setdefault(name, node)
    if mark.mixed:
        return
    for origin in origins(context, name):
        statistics(context, context.origins[origin], origin)


def origins(context: CouplingContext, name: str) -> list[str]:
    """The values in which samples were reduced and from which a reduced value is made, as far as not yet asked for."""

    def unasked(value: str) -> bool:
        mark = context.marks.get(value)
        return value not in context.walked and mark is not None and mark.kind in REDUCED

    def following(value: str) -> Iterable[str]:
        return filter(unasked, () if value in context.origins else context.index.operands(value))

    reached = list(walk(filter(unasked, [name]), following))
    context.walked.update(reached)
    return [value for value in reversed(reached) if value in context.origins]


def _set(context: CouplingContext, node: Node, marks: Marks) -> None:
    for name, mark in zip(node.outputs, marks):
        if name and mark is not None and name not in context.shared:
            context.marks[name] = mark
