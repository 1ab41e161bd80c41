"""Whether a node works element by element, may be random, or reads a shape alone: by the record of the operator."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.ir.graph import Node
from gopt.ir.nodes import nested
from gopt.operators.kinds import CONTROL_FLOW, ELEMENTWISE, HEAVY, MAY_DRAW, QUOTIENTS, RANDOM, SCALES
from gopt.operators.operator import Operator, Slope
from gopt.operators.table import UNKNOWN, operator


def record_of(node: Node) -> Operator:
    """The record of a node's operator; ``UNKNOWN`` for operators of other domains."""
    return operator(node.op_type) if node.domain in ("", "ai.onnx") else UNKNOWN


def chosen_by(node: Node) -> Sequence[str]:
    """The operands among which an elementwise node chooses, as a Where does; empty for other nodes."""
    choosers = record_of(node).choosers if elementwise(node) else ()
    return [name for slot, name in enumerate(node.inputs) if slot not in choosers] if choosers else []


def never_draws(op_type: str, operands: Sequence[str]) -> bool:
    """Return whether an operator lacks the operand to switch draws on."""
    switch = operator(op_type).switch
    return switch is not None and not any(operands[switch : switch + 1])


def order_of(node: Node, rank: int) -> tuple[int, ...] | None:
    """The dimensions of an operand of ``rank``, in the order of a node's result; None for other nodes."""
    order = record_of(node).order
    return tuple(node.attributes.get(order) or range(rank)[::-1]) if order else None


def swaps_last_axes(node: Node, rank: int) -> bool:
    """Return whether a node transposes the matrices of an operand of ``rank``: products read such operands in place."""
    order = order_of(node, rank)
    return order is not None and rank >= 2 and order == (*range(rank - 2), rank - 1, rank - 2)


def divisor_of(node: Node) -> str:
    """The divisor of a quotient; '' for other nodes."""
    return node.inputs[-1] if node.is_in(QUOTIENTS) else ""


def in_proportion(node: Node, name: str) -> bool:
    """Return whether a node is a product, or a quotient with ``name`` as the dividend."""
    return node.is_in(SCALES) and record_of(node).slope(node.inputs.index(name)) is Slope.LINEAR


def scale(node: Node) -> float:
    """The number in an attribute multiplying a node's product; 1 for other nodes."""
    return float(node.attributes.get(record_of(node).scale, 1.0))


def elementwise(node: Node) -> bool:
    return node.is_in(ELEMENTWISE)


def heavy(node: Node) -> bool:
    """Return whether the node is a contraction, or a loop, which likely holds contractions."""
    return node.op_type in HEAVY


def control_flow(node: Node) -> bool:
    return node.is_in(CONTROL_FLOW)


def random(node: Node) -> bool:
    """Return whether two runs with equal inputs may differ: the node is a generator without a seed, or an active
    dropout.

    Generators in the bodies of control flow count.
    """
    if node.op_type not in MAY_DRAW:
        return False
    if node.is_in(RANDOM):
        return "seed" not in node.attributes and not never_draws(node.op_type, node.inputs)
    if not control_flow(node) or (proto := node.proto) is None:
        return False
    return any(
        inner.op_type in RANDOM and all(attr.name != "seed" for attr in inner.attribute) for inner in nested([proto])
    )


def draws(node: Node) -> bool:
    """Return whether the node, or a node inside a body, is random."""
    if node.op_type not in MAY_DRAW:
        return False
    if not control_flow(node) or (proto := node.proto) is None:
        return random(node)
    bodies = [attribute.g for attribute in proto.attribute if attribute.HasField("g")]
    while bodies:
        body = bodies.pop()
        for node_inside in body.node:
            names = {attribute.name for attribute in node_inside.attribute}
            if node_inside.domain in ("", "ai.onnx") and node_inside.op_type in RANDOM and "seed" not in names:
                return True
            bodies += [attribute.g for attribute in node_inside.attribute if attribute.HasField("g")]
    return False


def value_reads(node: Node) -> Sequence[str]:
    """Return the operands whose elements influence a result: Shape and Size read a shape alone, CastLike the type of
    operand 1."""
    if node.domain not in ("", "ai.onnx") or not (unread := operator(node.op_type).by_type):
        return node.reads
    return [name for index, name in enumerate(node.inputs) if index not in unread]


def reads_value(node: Node, name: str) -> bool:
    """Return whether a node reading ``name`` depends on the elements."""
    return not operator(node.op_type).by_type or name in value_reads(node)
