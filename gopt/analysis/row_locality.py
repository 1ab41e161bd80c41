"""Whether a non-elementwise update takes each row separately, as Adagrad with one number for each row does."""

from __future__ import annotations

from gopt.analysis.row_reads import keeps_rows
from gopt.analysis.row_values import RowValues
from gopt.analysis.updates import UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import elementwise
from gopt.operators.kinds import REDUCTIONS


def mixes_rows(values: RowValues, subgraph: UpdateSubgraph) -> str:
    """Return the label of an update node that combines rows of the parameter; '' if each row is updated separately."""
    rows = (values.shape(subgraph.parameter.tensor) or (0,))[0]
    for node in subgraph.nodes:
        if not _by_row(values, node, rows):
            return f"{node.op_type} {node.label} takes more than one row"
    return ""


def _by_row(values: RowValues, node: Node, rows: int) -> bool:
    out = values.shape(node.outputs[0])
    if not out or out[0] != rows or len(node.outputs) != 1:
        return False
    if keeps_rows(values, node):
        return True
    if elementwise(node):
        return all(_aligned(values, name, out) for name in node.inputs if name)
    if not node.is_in(REDUCTIONS):
        return False
    axes = _axes(values, node)
    return bool(axes) and 0 not in axes and (values.shape(node.inputs[0]) or (0,))[0] == rows


def _aligned(values: RowValues, name: str, out: tuple[int, ...]) -> bool:
    """Return whether an operand has one element, a row for each row of the result, or one constant for all rows."""
    shape = values.shape(name)
    if shape is None:
        return False
    if all(size == 1 for size in shape):
        return True
    if len(shape) == len(out) and shape[0] == out[0]:
        return True
    across = len(shape) < len(out) or (len(shape) == len(out) and shape[0] == 1)
    return across and values.constant(name) is not None


def _axes(values: RowValues, node: Node) -> set[int]:
    """The dimensions that a reduction takes, from the front; empty where unknown."""
    rank = len(values.shape(node.inputs[0]) or ())
    return {axis % rank for axis in values.index.constants.axes(node) or () if rank}
