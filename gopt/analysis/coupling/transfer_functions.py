"""The table of rules: operator -> the mark of its result."""

from __future__ import annotations

from collections.abc import Callable

from gopt.analysis.coupling import contract, lookups, shapes
from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import DRAWN, Marks, Relation
from gopt.analysis.coupling.pointwise import pointwise
from gopt.ir.graph import Node
from gopt.operators.kinds import (
    ALL_REDUCTIONS,
    ARG_EXTREMES,
    ATTENTION,
    CLASS_LOSSES,
    DEPTH_MOVES,
    DRAWN_LIKE,
    ELEMENTWISE,
    GLOBAL_POOLS,
    LAYER_NORMS,
    PART_NORMS,
    POOLS,
    SOFTMAXES,
)

TransferFunction = Callable[[CouplingContext, Node], Marks]


def like(context: CouplingContext, node: Node) -> Marks:
    """Random numbers of the shape of their first operand."""
    mark = context.marks[node.inputs[0]]
    return [mark if mark.kind is Relation.SAMPLES else DRAWN for _ in node.outputs]


IN_FRONT = sorted(POOLS | GLOBAL_POOLS | DEPTH_MOVES | PART_NORMS | ATTENTION | {"LRN"})
"""Operators whose first dimension is the batch."""

RULES: dict[str, TransferFunction] = {
    **dict.fromkeys(ELEMENTWISE, pointwise),
    "Reshape": shapes.reshape,
    "Flatten": shapes.reshape,
    "Squeeze": shapes.squeeze,
    "Unsqueeze": shapes.unsqueeze,
    "Transpose": shapes.transpose,
    "Expand": shapes.expand,
    "Tile": shapes.tile,
    "Concat": shapes.concat,
    "Split": shapes.split,
    "Slice": shapes.slices,
    "Pad": shapes.pad,
    "Trilu": shapes.trilu,
    "Gather": lookups.gather,
    "GatherElements": lookups.gather_elements,
    "ScatterElements": lookups.gather_elements,
    "GatherND": lookups.gather_nd,
    "ScatterND": lookups.scatter_nd,
    "OneHot": lookups.one_hot,
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
    **dict.fromkeys(IN_FRONT, contract.in_front),
    **dict.fromkeys(sorted(CLASS_LOSSES), contract.loss_operator),
    **dict.fromkeys(sorted(DRAWN_LIKE), like),
}
