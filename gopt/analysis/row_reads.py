"""Finds how forward and backward read a parameter: rows by ids, or the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.analysis.row_values import RowValues
from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.ir.node_kinds import reads_value, record_of
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, VIEWS
from gopt.operators.operator import Indices


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table read by a node.

    ``ids``: the value whose elements, flattened, are the row numbers; a negative number counts from the end. ``rows``:
    the node's result, (number of ids) x (elements of a row) when flattened. ``view``: the table as the node reads it:
    the parameter, a cast, or the same rows in another shape. ``through``: the nodes between the two. ``prefetchable``:
    the ids are known before any parameter is read."""

    node: Node
    ids: str
    rows: str
    view: str
    through: tuple[Node, ...] = ()
    prefetchable: bool = True


@dataclass(slots=True)
class RowReads:
    """All reads of a parameter by forward and backward; ``whole``: why the parameter is no table, '' with row reads
    alone."""

    lookups: list[Lookup] = field(default_factory=list)
    whole: str = ""


def row_reads(values: RowValues, parameter: str, after_parameters: set[str]) -> RowReads:
    """Find all reads of a parameter outside the update.

    ``after_parameters``: all values that depend on some parameter.
    """
    uses = RowReads()
    shape = values.shape(parameter)
    views: list[tuple[str, tuple[Node, ...]]] = [(parameter, ())] if shape else []
    for view, through in views:  # grows
        if through and view in values.graph.outputs:
            uses.whole = uses.whole or f"output {view} contains all of it"
        for node in values.index.users.get(view, ()):
            if node.phase is Phase.UPDATE or not reads_value(node, view):
                continue
            if node.inputs[:1] == [view] and view not in (*node.inputs[1:], *node.captures):
                if keeps_rows(values, node):
                    views.append((node.outputs[0], (*through, node)))
                    continue
                back = values.undone(node)
                if back:
                    views += [(user.outputs[0], (*through, node, user)) for user in back]
                    continue
                ids = _looked_up(values, node)
                if ids:
                    early = ids not in after_parameters
                    uses.lookups.append(Lookup(node, ids, node.outputs[0], view, through, early))
                    continue
            uses.whole = uses.whole or f"{node.op_type} {node.label} reads all of it"
    return uses


def keeps_rows(values: RowValues, node: Node) -> bool:
    """Return whether a node keeps the rows of the first operand, in another shape or another floating type."""
    before, after = values.shape(node.inputs[0]), values.shape(node.outputs[0])
    if values.root(node.outputs[0]) == values.root(node.inputs[0]):
        return True
    if not before or not after or before[0] != after[0]:
        return False
    if node.is_in(CASTS):
        return values.graph.type_of(node.outputs[0]).dtype in FLOATS
    return node.is_in(VIEWS)


def _looked_up(values: RowValues, node: Node) -> str:
    """The ids by which a node reads whole rows of the first operand; '' for any other node."""
    shape = values.shape(node.inputs[0])
    if shape is None or len(node.inputs) != 2:
        return ""
    ids, indices = node.inputs[1], record_of(node).indices
    if indices is Indices.TUPLE and not node.attributes.get("batch_dims", 0):
        named = values.shape(ids)
        return ids if named and named[-1] == 1 else ""
    if indices in (None, Indices.TUPLE) or int(node.attributes.get("axis", 0)) not in (0, -len(shape)):
        return ""
    return ids if indices is Indices.SLICE else repeated_ids(values, ids, shape)


def repeated_ids(values: RowValues, indices: str, shape: tuple[int, ...]) -> str:
    """Ids of rows of a table of that shape, from indices for single elements: one id for all elements of a row.

    '' where the indices may differ inside a row, or name a part of a row."""
    if len(shape) == 1:
        return indices
    node, dims = values.producer(indices), values.shape(indices)
    if node is None or not node.is_a("Expand") or dims is None or dims[1:] != shape[1:]:
        return ""
    ids = values.shape(node.inputs[0])
    one = ids is not None and len(ids) == len(shape) and all(size == 1 for size in ids[1:]) and ids[0] == dims[0]
    return node.inputs[0] if one else ""
