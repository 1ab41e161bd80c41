"""Propagates placements through nodes, along an axis: one rule per operator family.

A rule sees one axis of the mesh at a time. A rule returns the placement of all results, or raises Mismatch for the
first operand in a wrong placement. Operators without a rule take operands equal on all members or the members' own, and
results have the same placement. To support a placement in another family, add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, COMBINERS, COMPARISONS, ELEMENTWISE, QUOTIENTS, SPREADS, TYPED
from gopt.operators.operator import Slope
from gopt.operators.table import OPERATORS, operator
from gopt.records.placements import (
    FLAG_COUNT,
    PER_MEMBER,
    REPLICATED,
    FlagCount,
    FlatShard,
    OnMember,
    Partial,
    PerMember,
    Place,
    Placement,
    Replicated,
    holder,
)


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a node: its placement along the axis, and the properties of its type for rules."""

    name: str
    placement: Placement
    single: bool = False
    """It has one element, so that it broadcasts into a shard of any length."""
    dtype: str = ""
    zero: bool = False
    """It is a constant zero. Only asked beside a ``FlagCount``."""


@dataclass(frozen=True, slots=True)
class Use:
    """A node in view of a rule. ``single``: all results are scalars; ``dtype``: of the first result."""

    op_type: str
    operands: tuple[Operand, ...]
    place: Place = REPLICATED
    single: bool = False
    dtype: str = ""
    standard: bool = True
    """Whether the operator is one of ONNX's own."""


class Mismatch(Exception):
    """An operand in a wrong placement, and the expected placement."""

    def __init__(self, operand: Operand, expected: str) -> None:
        super().__init__(operand, expected)
        self.operand, self.expected = operand, expected


Rule = Callable[[Use], Placement]


def result(use: Use) -> Placement:
    """The placement of a node's results along an axis; raises Mismatch."""
    if isinstance(use.place, OnMember):
        return on_member(use, use.place.member)
    use = _read(use)
    placements = [operand.placement for operand in use.operands]
    sole = holder(use.place)
    if sole is not None and all(holder(part) == sole or isinstance(part, Replicated) for part in placements):
        return _alone(use, sole)
    _check_presence(use)
    if any(isinstance(part, Partial) for part in placements):
        return partial(use)
    if any(isinstance(part, FlagCount) for part in placements):
        return flag_count(use)
    if use.standard and use.op_type in FULL_REDUCTIONS and any(isinstance(part, FlatShard) for part in placements):
        return reduction(use)
    rule = RULES.get(use.op_type, whole) if use.standard else whole
    return rule(use)


def _check_presence(use: Use) -> None:
    """Refuse shards and terms on other members than those running the node: some would be lost."""
    shard = use.place if isinstance(use.place, FlatShard) else None
    for operand in use.operands:
        placement = operand.placement
        if isinstance(placement, Partial) and placement.on != shard:
            raise Mismatch(operand, f"terms on the members that run it, {use.place}")
        if isinstance(placement, FlatShard) and shard not in (None, placement):
            raise Mismatch(operand, f"{shard}, on which it runs")


def _read(use: Use) -> Use:
    """A node without the operands read for the type alone, except values of a single member. Raises Mismatch where a
    member runs the node without a part of such an operand."""
    if not use.standard or use.op_type not in TYPED:
        return use
    by_type = operator(use.op_type).by_type
    read = [x for slot, x in enumerate(use.operands) if slot not in by_type or isinstance(x.placement, OnMember)]
    rest = [x for slot, x in enumerate(use.operands) if slot in by_type and not _on_all(x.placement)]
    _check_presence(replace(use, operands=tuple(rest)))
    return replace(use, operands=tuple(read))


def _on_all(placement: Placement) -> bool:
    """Return whether every member has a term of a value."""
    return isinstance(placement, Partial) and placement.on is None


# --- families ---------------------------------------------------------------------------------------------------------


def whole(use: Use) -> Placement:
    """Any operator runs on whole operands alone."""
    placement: Placement = REPLICATED
    for operand in use.operands:
        if isinstance(operand.placement, PerMember):
            placement = PER_MEMBER
        elif not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, "operands that are equal on all members, or each member's own")
    return placement


def elementwise(use: Use) -> Placement:
    """Elementwise operators: equal shards, with scalars equal on all members."""
    flat = next((operand.placement for operand in use.operands if isinstance(operand.placement, FlatShard)), None)
    if flat is None:
        return whole(use)
    for operand in use.operands:
        if operand.placement != flat and not (isinstance(operand.placement, Replicated) and operand.single):
            raise Mismatch(operand, f"the shard that it reads beside it, {flat}, or one element equal on all members")
    return flat


def reduction(use: Use) -> Placement:
    """A full reduction of a shard: each member's term of the reduction of the whole."""
    operand, *axes = use.operands
    for axis in axes:
        if not isinstance(axis.placement, Replicated):
            raise Mismatch(axis, "axes that are equal on all members")
    flat = operand.placement
    assert isinstance(flat, FlatShard)
    if not use.single:
        raise Mismatch(operand, "a whole tensor, to reduce it along some of its axes")
    op = FULL_REDUCTIONS[use.op_type]
    if not op:
        raise Mismatch(operand, f"a whole tensor: what members make of shards is not a term of {use.op_type}")
    if op == "mean" and len({flat.length(member) for member in range(len(flat.cuts) - 1)}) > 1:
        raise Mismatch(operand, "shards of one length: the mean of unequal shards' means is not the mean")
    if op == "mean" and operand.dtype and operand.dtype not in FLOATS:
        raise Mismatch(operand, "a floating type: a mean of integers is truncated")
    if operand.dtype == "bool":
        op = {"max": "any", "min": "all"}.get(op, op)
    return Partial(op, use.place if isinstance(use.place, FlatShard) else None)


def partial(use: Use) -> Placement:
    """Terms of a value still to be reduced: only operators the reduction passes through."""
    terms = [operand for operand in use.operands if isinstance(operand.placement, Partial)]
    placement = terms[0].placement
    assert isinstance(placement, Partial)
    for operand in terms:
        if operand.placement != placement:
            raise Mismatch(operand, f"{placement}, as the others are")
    operands = [operand for operand in use.operands if not isinstance(operand.placement, Partial)]
    for operand in operands:
        if not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, f"a value equal on all members beside {placement}")
    passed = _through(use, placement, terms, operands) if use.standard else None
    if passed is None:
        raise Mismatch(terms[0], f"the value itself: {use.op_type} of terms is not a term of its result")
    return passed


def _through(use: Use, placement: Partial, terms: Sequence[Operand], operands: Sequence[Operand]) -> Partial | None:
    """Return the placement of a result of partial operands; None for an operator not commuting with the reduction."""
    op, on, kind = placement.op, placement.on, use.op_type
    if kind in SPREADS and use.operands[0] in terms:
        return placement
    if kind in CASTS:
        return _cast(placement, terms[0].dtype, use.dtype)
    if kind == "Not" and op in ("any", "all"):
        return Partial("all" if op == "any" else "any", on)
    if kind in COMBINERS.get(op, ()):
        return placement if not operands or op not in ("sum", "mean", "count") else None
    if op not in ("sum", "mean"):
        return None
    record, slot = operator(kind), use.operands.index(terms[0])
    if record.joins:
        return None if operands else placement
    scales = record.elementwise and not record.by_type and len(terms) == 1 and record.slope(slot) is Slope.LINEAR
    cut_off = kind in QUOTIENTS and terms[0].dtype not in {"", *FLOATS}  # as a quotient of whole numbers is
    return placement if scales and not cut_off else None


def _cast(placement: Partial, old: str, new: str) -> Partial | None:
    """Terms in another type: rounded, but never cut off or made flags."""
    if placement.op == "any":
        return Partial("count", placement.on) if new != "bool" else placement
    if placement.op == "count":  # in a short whole type the sum may come round to zero
        return placement if new in FLOATS or new in ("int32", "int64", old) else None
    if placement.op == "all" or new == "bool":
        return None
    exact = placement.op in ("max", "min") or not new or new in FLOATS or old == new
    return placement if exact else None


def flag_count(use: Use) -> Placement:
    """The number of members that set a flag: comparing the number with zero gives the flag again; it may be moved."""
    count, *operands = sorted(use.operands, key=lambda operand: not isinstance(operand.placement, FlagCount))
    leads = use.operands[0] is count
    if use.standard and len(operands) == 1 and operands[0].zero and use.op_type in COMPARISONS:
        none, *some = (_compared(use.op_type, (number, 0) if leads else (0, number)) for number in (0, 1, 2))
        if none not in some:
            return REPLICATED
    elif use.standard and use.op_type in CASTS and use.dtype == "bool":
        return REPLICATED
    elif use.standard and use.op_type in SPREADS and leads:
        return FLAG_COUNT
    raise Mismatch(count, "the flag itself, which is whether the number is greater than zero")


def _compared(kind: str, numbers: tuple[int, int]) -> bool:
    kernel = operator(kind).kernel
    assert kernel is not None
    return bool(kernel({}, [np.array(number) for number in numbers]))


def on_member(use: Use, member: int) -> Placement:
    """A node run by one member, on the values of the member."""
    for operand in use.operands:
        if not isinstance(operand.placement, Replicated) and holder(operand.placement) != member:
            raise Mismatch(operand, f"what member {member} has, or a value equal on all members")
    return OnMember(member)


def _alone(use: Use, member: int) -> Placement:
    """A node on one member's part of a bucket: any operator, on whole values."""
    if not use.standard or use.op_type not in ELEMENTWISE:
        return OnMember(member)
    rest = [operand for operand in use.operands if operand.placement != use.place]
    for operand in rest:
        if isinstance(operand.placement, FlatShard):
            raise Mismatch(operand, f"{use.place}, element by element")
    return use.place if len(rest) < len(use.operands) and all(operand.single for operand in rest) else OnMember(member)


FULL_REDUCTIONS = {
    name: "" if op.pieces == "l2" else op.pieces for name, op in OPERATORS.items() if op.pieces is not None
}
"""Operator -> how its results over shards are reduced to the result of the whole; empty: they are not."""
RULES: dict[str, Rule] = dict.fromkeys(ELEMENTWISE, elementwise)
"""Operator of ONNX -> its rule for operands without terms; ``whole`` for all others."""
