"""Propagates placements through nodes, along one axis: one rule per operator family.

A rule sees one axis of the mesh at a time. It gives the placement of all results, or raises Mismatch for the first
operand that the operator cannot take so. An operator without a rule of its own takes operands that are equal on all
members, or the members' own, and passes that on. To support a placement in another family is to add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gopt.ir.types import FLOATS
from gopt.operators.kinds import COMBINERS, ELEMENTWISE, SPREADS
from gopt.operators.table import OPERATORS
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
    """An operand of a node: its placement along the axis, and the properties of its type that rules need."""

    name: str
    placement: Placement
    single: bool = False
    """It has one element, so that it broadcasts into a shard of any length."""
    dtype: str = ""
    zero: bool = False
    """It is a constant zero. Only asked beside a ``FlagCount``."""


@dataclass(frozen=True, slots=True)
class Use:
    """One node as a rule sees it. ``single``: all its results have one element; ``dtype``: that of the first."""

    op_type: str
    operands: tuple[Operand, ...]
    place: Place = REPLICATED
    single: bool = False
    dtype: str = ""
    standard: bool = True
    """Whether the operator is one of ONNX's own."""


class Mismatch(Exception):
    """An operand that an operator cannot take: which, and what it takes."""

    def __init__(self, operand: Operand, expected: str) -> None:
        super().__init__(operand, expected)
        self.operand, self.expected = operand, expected


Rule = Callable[[Use], Placement]


def result(use: Use) -> Placement:
    """The placement of a node's results along one axis; raises Mismatch."""
    if isinstance(use.place, OnMember):
        return on_member(use, use.place.member)
    placements = [operand.placement for operand in use.operands]
    sole = holder(use.place)
    if sole is not None and all(holder(each) == sole or isinstance(each, Replicated) for each in placements):
        return _alone(use, sole)
    _check_presence(use)
    if any(isinstance(each, Partial) for each in placements):
        return partial(use)
    if any(isinstance(each, FlagCount) for each in placements):
        return flag_count(use)
    if use.standard and use.op_type in FULL_REDUCTIONS and any(isinstance(each, FlatShard) for each in placements):
        return reduction(use)
    rule = RULES.get(use.op_type, whole) if use.standard else whole
    return rule(use)


def _check_presence(use: Use) -> None:
    """Refuse shards and terms that other members have than those that run the node: some would be lost."""
    there = use.place if isinstance(use.place, FlatShard) else None
    for operand in use.operands:
        given = operand.placement
        if isinstance(given, Partial) and given.on != there:
            raise Mismatch(operand, f"terms on the members that run it, {use.place}")
        if isinstance(given, FlatShard) and there not in (None, given):
            raise Mismatch(operand, f"{there}, on which it runs")


# --- families ---------------------------------------------------------------------------------------------------------


def whole(use: Use) -> Placement:
    """Any operator: it runs on what each member has, which must be all of it."""
    found: Placement = REPLICATED
    for operand in use.operands:
        if isinstance(operand.placement, PerMember):
            found = PER_MEMBER
        elif not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, "operands that are equal on all members, or each member's own")
    return found


def elementwise(use: Use) -> Placement:
    """Elementwise operators: equal shards, with one-element values that are equal on all members."""
    flat = next((each.placement for each in use.operands if isinstance(each.placement, FlatShard)), None)
    if flat is None:
        return whole(use)
    for operand in use.operands:
        if operand.placement != flat and not (isinstance(operand.placement, Replicated) and operand.single):
            raise Mismatch(operand, f"the shard that it reads beside it, {flat}, or one element equal on all members")
    return flat


def reduction(use: Use) -> Placement:
    """A full reduction of a shard: each member's term of the reduction of the whole."""
    operand, *axes = use.operands
    for other in axes:
        if not isinstance(other.placement, Replicated):
            raise Mismatch(other, "axes that are equal on all members")
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
    """Terms of a value still to be reduced: only operators that the reduction passes through."""
    terms = [operand for operand in use.operands if isinstance(operand.placement, Partial)]
    placement = terms[0].placement
    assert isinstance(placement, Partial)
    for operand in terms:
        if operand.placement != placement:
            raise Mismatch(operand, f"{placement}, as the others are")
    others = [operand for operand in use.operands if not isinstance(operand.placement, Partial)]
    for operand in others:
        if not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, f"a value equal on all members beside {placement}")
    made = _through(use, placement, terms, others) if use.standard else None
    if made is None:
        raise Mismatch(terms[0], f"the value itself: {use.op_type} of terms is not a term of its result")
    return made


def _through(use: Use, placement: Partial, terms: Sequence[Operand], others: Sequence[Operand]) -> Partial | None:
    """Return the placement of a result of partial operands; None if operator and reduction do not commute."""
    op, on, kind = placement.op, placement.on, use.op_type
    if kind in SPREADS and use.operands[0] in terms:
        return placement
    if kind == "Cast":
        return _cast(placement, terms[0].dtype, use.dtype)
    if kind == "Not" and op in ("any", "all"):
        return Partial("all" if op == "any" else "any", on)
    if kind in COMBINERS.get(op, ()):
        return placement if not others or op not in ("sum", "mean", "count") else None
    if op in ("sum", "mean"):
        if kind == "Neg" or (kind == "Concat" and not others):
            return placement
        if kind == "Mul" and len(terms) == 1:
            return placement
        floating = not terms[0].dtype or terms[0].dtype in FLOATS  # a quotient of whole numbers is cut off
        if kind == "Div" and len(terms) == 1 and use.operands[0] is terms[0] and floating:
            return placement
    return None


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
    """The number of members that set a flag: it is compared with zero, which gives the flag, or moved."""
    count, *others = sorted(use.operands, key=lambda operand: not isinstance(operand.placement, FlagCount))
    first = use.operands[0] is count
    if use.standard and len(others) == 1 and others[0].zero:
        if use.op_type == "Equal" or use.op_type == ("Greater" if first else "Less"):
            return REPLICATED
    elif use.standard and use.op_type == "Cast" and use.dtype == "bool":
        return REPLICATED
    elif use.standard and use.op_type in SPREADS and first:
        return FLAG_COUNT
    raise Mismatch(count, "the flag itself, which is whether the number is greater than zero")


def on_member(use: Use, member: int) -> Placement:
    """A node that one member runs, on what that member has."""
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
    return use.place if len(rest) < len(use.operands) and all(each.single for each in rest) else OnMember(member)


FULL_REDUCTIONS = {
    name: "" if each.pieces == "l2" else each.pieces for name, each in OPERATORS.items() if each.pieces is not None
}
"""Operator -> how its results over shards are reduced to that of the whole; empty: they are not."""
RULES: dict[str, Rule] = dict.fromkeys(ELEMENTWISE, elementwise)
"""Operator of ONNX -> its rule for operands without terms; ``whole`` for all others."""
