"""Values reduced over samples: which of them are sums or means of the ranks' values."""

from __future__ import annotations

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.contract import settled
from gopt.analysis.coupling.marks import EXTREMES, REDUCED, Mark, Relation, changed
from gopt.analysis.linearity import CONSTANT, level
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import chosen_by, record_of, value_reads
from gopt.ir.types import FLOATS
from gopt.operators.kinds import (
    CASTS,
    COMBINERS,
    COMPARISONS,
    CONTRACTIONS,
    COUNTS,
    FLOAT_TESTS,
    GATHERS,
    LINEAR_IN_FIRST,
    LOGIC,
    PARTS,
    RELAYS,
    SCALES,
    SUMS,
)

COMPARE = COMPARISONS | FLOAT_TESTS | LOGIC
SAME = LINEAR_IN_FIRST | CASTS | {"Pad"}
_MOVES = RELAYS | PARTS | GATHERS


def reduced(context: CouplingContext, node: Node) -> Mark:
    """The mark of a node's result, from reduced values and values that do not depend on the batch."""
    names = [name for name in value_reads(node) if name]
    marks = [context.marks[name] for name in names if name in context.marks]
    first = marks[0]
    mixed = any(mark.mixed for mark in marks)
    even = all(mark.sound for mark in marks)
    joint = Mark(Relation.JOINT, origin=node.outputs[0], mixed=mixed, even=even)
    if node.is_in(COMPARE):
        return changed(joint, kind=Relation.GATE)
    if node.captures or any(mark.kind not in REDUCED for mark in marks):
        return joint
    if any(mark.kind in EXTREMES for mark in marks):
        return _extreme(node, marks) or joint
    if not _exact(context, node):
        return joint
    if node.is_in(SAME) and names[0] in context.marks and len(marks) == 1:
        if first.kind is Relation.SUM and level(context.index, node, [0, *[CONSTANT] * (len(names) - 1)]):
            return joint  # what is filled in is no sum
        return changed(first, factor=first.factor * record_of(node).sign(0))
    found: Mark | None = None
    if node.is_in(SUMS | {"Concat"}):
        found = _added(context, node, names)
    elif node.is_in(SCALES):
        found = _scaled(context, node, names)
    elif node.is_in(CONTRACTIONS) and len(marks) == 1 and len(names) == 2:
        found = first if first.kind is not Relation.SUM else changed(first, factor=0.0)
    elif node.is_a("Clip") and ("max" in node.attributes or any(node.inputs[2:])):
        found = None  # an upper bound on a sum gives no sum
    elif node.is_a("Max", "Clip") and first.kind is Relation.SUM and len(marks) == 1:
        found = changed(first, even=False)  # a count that is kept from being zero
    elif (branches := chosen_by(node)) and context.marks.get(names[0], joint).kind is Relation.GATE:
        inside = [context.marks[name] for name in branches if name in context.marks]
        found = changed(inside[0], even=False) if len(inside) == 1 else None  # a count of zero gives a constant
    return joint if found is None or found.kind in (Relation.JOINT, Relation.GATE) else changed(found, mixed=mixed)


def _exact(context: CouplingContext, node: Node) -> bool:
    """Return whether a node keeps fractions: a cast to integers or flags, and a quotient of integers, drop them."""
    type_of = context.index.graph.type_of
    kept = type_of(node.outputs[0]).dtype in FLOATS
    if node.is_in(CASTS):
        return kept or type_of(node.inputs[0]).dtype not in (*FLOATS, "bool")
    return kept or record_of(node).exponent(1) >= 0


def _extreme(node: Node, marks: list[Mark]) -> Mark | None:
    """The mark of a function of extremes, where it is one of the same elements."""
    first = marks[0]
    if any(mark.kind is not first.kind for mark in marks):
        return None
    how = first.kind.value
    joins = node.is_in(COMBINERS[how]) or record_of(node).pieces == how
    return first if joins or (node.is_in(_MOVES) and len(marks) == 1) else None


def _added(context: CouplingContext, node: Node, names: list[str]) -> Mark | None:
    """A sum of sums is a sum, of means a mean; values that do not depend on the batch may only be added to a mean."""
    marks = [context.marks.get(name) for name in names]
    known = [mark for mark in marks if mark is not None]
    first = known[0]
    if any((mark.kind, mark.by) != (first.kind, first.by) for mark in known):
        return None
    free = [name for name, mark in zip(names, marks) if mark is None]
    if free and first.kind is Relation.SUM and record_of(node).joins:
        if not all(map(context.index.constants.zero, free)):
            return None  # rows that no sample enters are no sums
    elif free and first.kind is Relation.SUM:
        if not all(context.scalar(name) and abs(context.scalar(name)) < 1e-3 for name in free):
            return None  # more than an epsilon
        first = changed(first, even=False)
    same = all(mark.factor == first.factor for mark in known)
    doubt = any(mark.doubt for mark in known)
    even = first.even and all(mark.even for mark in known)
    return changed(first, factor=first.factor if same else 0.0, doubt=doubt, even=even, count=first.count * same)


def _scaled(context: CouplingContext, node: Node, names: list[str]) -> Mark | None:
    """Products with values that do not depend on the batch; a quotient of two sums is a mean weighted by the second."""
    left, right = (context.marks.get(name) for name in names)
    divides = record_of(node).exponent(1) < 0
    if left is not None and right is not None:
        alike = left.kind is right.kind and left.kind in (Relation.SUM, Relation.MEAN)
        one = context.index.graph.type_of(names[1]).elements == 1
        if divides and alike and one and not left.doubt and not right.doubt:
            return Mark(
                Relation.WEIGHTED, origin=left.origin, by=unguarded(context, names[1]), even=left.even and right.even
            )  # fmt: skip
        return None
    if left is None and divides:
        return None
    mark, other = (left, names[1]) if left is not None else (right, names[0])
    assert mark is not None
    if mark.kind is not Relation.SUM:
        return mark
    constant = context.scalar(other)
    if divides:
        constant = 1 / constant if constant else 0.0
    factor = mark.factor * constant
    return settled(context, changed(mark, factor=factor), constant)


def unguarded(context: CouplingContext, name: str) -> str:
    """A count before its cast or its guard against zero: the value that is summed over ranks."""
    while (node := context.index.producers.get(name)) is not None:
        inside = [each for each in node.inputs if each in context.marks]
        if not node.is_in(COUNTS) or len(inside) != 1 or context.index.graph.type_of(inside[0]).elements != 1:
            break
        name = inside[0]
    return name


def guarded(index: GraphIndex, name: str) -> str:
    """The number that divides by a count: the count in another type or shape, kept from being zero."""
    while readers := [node for node in index.users.get(name, ()) if node.is_in(COUNTS)]:
        name = readers[0].outputs[0]
    return name
