"""The table of rules: operator -> the mark of its result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from gopt.analysis.coupling import contract, lookups, shapes
from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import DRAWN, Marks, Relation, Untraceable, changed
from gopt.analysis.coupling.pointwise import by_place, pointwise
from gopt.ir.graph import Node
from gopt.ir.node_kinds import record_of
from gopt.operators.kinds import (
    ALL_REDUCTIONS,
    ARG_EXTREMES,
    CLASS_LOSSES,
    DRAWN_LIKE,
    ELEMENTWISE,
    LAYER_NORMS,
    LAYOUT,
    POOLS,
    SOFTMAXES,
)

TransferFunction = Callable[[CouplingContext, Node], Marks]


def like(context: CouplingContext, node: Node) -> Marks:
    """Random numbers of the shape of their first operand."""
    mark = context.marks[node.inputs[0]]
    return [mark if mark.kind is Relation.SAMPLES else DRAWN for _ in node.outputs]


def by_dims(context: CouplingContext, node: Node) -> Marks:
    """The samples of results, by the dimensions along which the operator's record is split."""
    marks = [context.samples(name) for name in node.inputs]
    first = next((mark for mark in marks if mark is not None), None)
    if first is None and node.is_in(LAYOUT):
        return [DRAWN for _ in node.outputs]
    if record_of(node).dims is None or first is None:
        raise Untraceable("gopt has no rule for this operator")
    mixed, constant = any(mark and mark.mixed for mark in marks), first.factor if node.is_in(LAYOUT) else 1.0
    drawn = any(mark is None and context.marks.get(name) is DRAWN for name, mark in zip(node.inputs, marks))
    if drawn or any(mark and (mark.outer, mark.inner) != (first.outer, first.inner) for mark in marks):
        raise Untraceable("operands count their samples differently")
    for factor in context.factors(node):
        operands = list(zip_longest(node.inputs, marks, factor.operands))
        whole = not (factor.reduce or factor.masked) and all(isinstance(each, int) for each in factor.results)
        if not whole or any(mark and axis != mark.axis for _, mark, axis in operands):
            continue
        for name, mark, axis in operands:
            if name and mark is None and isinstance(axis, int) and not context.alike(name, axis, first):
                by_place(context, node, f"{name!r} has a value of its own for every place of the batch")
        return [changed(first, axis=place, mixed=mixed, factor=constant) for place in factor.results]
    raise Untraceable("it does not take samples one by one along this dimension")


RULES: dict[str, TransferFunction] = {
    **dict.fromkeys(ELEMENTWISE, pointwise),
    "Reshape": shapes.reshape,
    "Flatten": shapes.reshape,
    "Squeeze": shapes.squeeze,
    "Unsqueeze": shapes.unsqueeze,
    "Expand": shapes.expand,
    "Tile": shapes.tile,
    "Concat": shapes.concat,
    "Split": shapes.split,
    "Slice": shapes.slices,
    "Gather": lookups.gather,
    "GatherElements": lookups.gather_elements,
    "ScatterElements": lookups.gather_elements,
    "GatherND": lookups.gather_nd,
    "ScatterND": lookups.scatter_nd,
    "MatMul": contract.matmul,
    "Gemm": contract.gemm,
    "Einsum": contract.einsum,
    "Conv": contract.conv,
    "ConvTranspose": contract.conv,
    **dict.fromkeys(sorted(ALL_REDUCTIONS | ARG_EXTREMES), contract.reduction),
    **dict.fromkeys(sorted(SOFTMAXES), contract.along),
    "LpNormalization": contract.along,
    "CumSum": contract.along,
    "TopK": contract.along,
    **dict.fromkeys(sorted(LAYER_NORMS), contract.layer_norm),
    "BatchNormalization": contract.batch_norm,
    **dict.fromkeys(sorted(POOLS), contract.in_front),
    **dict.fromkeys(sorted(CLASS_LOSSES), contract.loss_operator),
    **dict.fromkeys(sorted(DRAWN_LIKE), like),
}
