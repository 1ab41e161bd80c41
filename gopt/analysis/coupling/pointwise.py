"""Elementwise operators: operands are aligned at the last dimension, and all samples must be along one dimension."""

from __future__ import annotations

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import REDUCED, CouplingKind, Mark, Marks, Relation, Untraceable, changed
from gopt.analysis.coupling.uniform_factors import UniformFactors
from gopt.ir.graph import Node
from gopt.ir.node_kinds import in_proportion, record_of, value_reads
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, LINEAR_IN_FIRST, SCALES, TERMS
from gopt.operators.operator import Slope


def pointwise(context: CouplingContext, node: Node) -> Marks:
    """Mark of the one result of an operator that works element by element after broadcasting."""
    mark = aligned(context, node, [name for name in value_reads(node) if name], context.rank(node.outputs[0]))
    return [changed(mark, factor=_factor(context, node, mark), divided=_divided(context, node)) for _ in node.outputs]


def aligned(context: CouplingContext, node: Node, names: list[str], rank: int) -> Mark:
    """The common mark of operands that are broadcast against each other to ``rank`` dimensions."""
    found: Mark | None = None
    for name in names:
        mark = context.samples(name)
        if mark is None:
            continue
        here = changed(mark, axis=mark.axis + rank - context.rank(name))
        if found is None:
            found = here
        elif here.axis != found.axis:
            in_batch(context, node)
            found = changed(found, mixed=True)
        elif (here.outer, here.inner) != (found.outer, found.inner):
            raise Untraceable("two operands count the samples of one dimension differently")
        else:
            found = changed(found, mixed=found.mixed or here.mixed, factor=1.0)
    if found is None:
        return Mark(Relation.DRAWN)
    for name in names:
        _beside(context, node, name, found, rank)
    return found


def _beside(context: CouplingContext, node: Node, name: str, mark: Mark, rank: int) -> None:
    """Check a value that does not depend on the batch along the sample dimension."""
    other, own = context.marks.get(name), mark.axis - rank + context.rank(name)
    if own < 0:
        if other is not None and other.kind is Relation.DRAWN:
            raise Untraceable(f"all samples share the random {name!r}")
        return
    if other is not None and other.kind is Relation.SAMPLES:
        return
    if other is not None and other.kind is Relation.DRAWN:
        if context.shape(name)[own] == 1 != context.extent(mark):
            raise Untraceable(f"all samples share the random {name!r}")
        return
    if other is not None and other.kind in REDUCED:
        if not context.alike(name, own, mark):
            raise Untraceable(f"{name!r} holds a value for every place of the batch")
        return
    if not mark.mixed and not context.alike(name, own, mark):
        by_place(context, node, f"{name!r} has a value of its own for every place of the batch")


def by_place(context: CouplingContext, node: Node, what: str) -> None:
    """Record that a result depends on the index of a sample in the batch."""
    context.couple(CouplingKind.PLACE, node, f"{what}, read by {node.label!r}")


def in_batch(context: CouplingContext, node: Node) -> None:
    """Record that a result depends on several samples."""
    context.couple(
        CouplingKind.IN_BATCH, node,
        f"{node.outputs[0]!r} ({node.op_type}) compares samples with each other, and a rank has only its own",
        "the model itself would have to gather the ranks' samples",
    )  # fmt: skip


def _factor(context: CouplingContext, node: Node, mark: Mark) -> float:
    """The constant factor that a value was last multiplied by."""
    if mark.kind is not Relation.SAMPLES or record_of(node).slope(0) is not Slope.LINEAR:
        return 1.0
    return times(context, node, next((name for name in node.inputs if context.samples(name)), ""))


def _divided(context: CouplingContext, node: Node) -> int | None:
    """How often single samples were divided by a size of the batch; None where another function was taken of both."""
    names = [name for name in value_reads(node) if name and context.index.graph.type_of(name).dtype in FLOATS]
    powers = [_power(context, name) for name in names]
    if not any(power != 0 for power in powers):
        return 0
    if node.is_in(SCALES) and len(powers) == 2 and powers[0] is not None and powers[1] is not None:
        return powers[0] + powers[1] * record_of(node).exponent(1)
    added = {power for name, power in zip(names, powers) if not context.index.constants.zero(name)}
    linear = node.is_in(TERMS | LINEAR_IN_FIRST | CASTS)
    return added.pop() if linear and len(added) == 1 else None


def _power(context: CouplingContext, name: str) -> int | None:
    mark, index = context.marks.get(name), context.index
    if mark is not None:
        return mark.divided
    if name not in index.producers or index.graph.type_of(name).elements != 1 or context.constant(name) is not None:
        return 0
    factors = UniformFactors(context)
    return -factors.of(name).batches or (None if factors.sized(name) else 0)


def times(context: CouplingContext, node: Node, name: str) -> float:
    """The factor of ``name``, one of the operands, after a product, quotient, sign or cast; 0 for an unknown one."""
    before = context.marks[name].factor
    if record_of(node).linear_in_first:
        return before
    others = [each for each in node.inputs if each != name]
    if len(others) != 1 or context.index.graph.type_of(others[0]).elements != 1:
        return 1.0  # a weight, or a square: no constant
    constant = context.scalar(others[0])
    if record_of(node).exponent(1) > 0:
        return before * constant
    return before / constant if constant and in_proportion(node, name) else 0.0
