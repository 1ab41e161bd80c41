"""The layout operators of the domain ``gopt.spmd``, along the axis that shards: how shards are cut and joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gopt.ir.types import FLOATS
from gopt.records.placements import (
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    Partial,
    PerMember,
    Place,
    Placement,
    Replicated,
    holder,
)
from gopt.spmd.rules import Mismatch, Operand

_IDENTITY = {"sum": 0.0, "any": 0.0, "all": 1.0, "max": float("-inf"), "min": float("inf")}


def identity(op: str, dtype: str) -> float | int:
    """Return the neutral element of a reduction in a dtype: the contribution of a member without a term."""
    value = _IDENTITY[op]
    if abs(value) == float("inf") and dtype not in FLOATS:
        info = np.iinfo(dtype)
        return int(info.max if value > 0 else info.min)
    return value


@dataclass(frozen=True, slots=True)
class LayoutUse:
    """One use of a layout operator; ``members``: of the axis."""

    op_type: str
    attributes: Mapping[str, Any]
    place: Place
    members: int


def lay(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """The placement of the result; raises Mismatch."""
    return LAYOUTS[use.op_type](use, operands)


def local_slice(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """Whole tensors, equal on all members -> each member's part of the tensors as a bucket."""
    for operand in operands:
        if not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, "a whole value that is equal on all members, to cut it")
    return use.place


def shard_slice(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """A part of a bucket -> a smaller part."""
    placement, shard = operands[0].placement, use.place
    inside = (
        isinstance(placement, FlatShard)
        and isinstance(shard, FlatShard)
        and placement.cuts == shard.cuts
        and placement.start <= shard.start
        and shard.stop <= placement.stop
    )
    if not inside:
        raise Mismatch(operands[0], f"a shard that holds {shard}")
    return shard


def local_concat(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """Neighbouring parts of a bucket, or whole tensors of members in order -> a part of a bucket."""
    flats = [operand.placement for operand in operands if isinstance(operand.placement, FlatShard)]
    if len(flats) == len(operands):
        for (before, after), operand in zip(pairwise(flats), operands[1:]):
            if before.cuts != after.cuts or before.stop != after.start:
                raise Mismatch(operand, f"the part of the bucket behind {before}")
        return FlatShard(flats[0].cuts, flats[0].start, flats[-1].stop)
    owners = []
    for operand in operands:
        member = operand.placement.member if isinstance(operand.placement, OnMember) else None
        if member is None:
            raise Mismatch(operand, "parts of one bucket, or tensors that each lie on one member")
        owners.append(member)
    joined = FlatShard.joined(tuple(owners), tuple(use.attributes["sizes"]), use.members)
    if joined is None:
        raise Mismatch(operands[0], "tensors in the order of their members")
    return joined


def select(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """Value of some members -> a term on all members; ``reduce`` gives the reduction."""
    operand, op = operands[0], str(use.attributes["reduce"])
    placement = operand.placement
    if op not in _IDENTITY:
        raise Mismatch(operand, f"another reduction: {op} has no neutral element")
    if isinstance(placement, Partial):
        if placement.op != op:
            raise Mismatch(operand, f"terms of a reduction by {op}")
    elif holder(placement) is None:
        raise Mismatch(operand, "terms, or a value on one member")
    return Partial(op)


def dim_slice(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """A value equal on all members -> each member's part of a dimension."""
    for operand in operands:
        if not isinstance(operand.placement, Replicated):
            raise Mismatch(operand, "a whole value that is equal on all members, to cut it")
    return PER_MEMBER


def member_choice(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """A choice along a sharded dimension, or along windows -> each member's own choice."""
    for operand in operands:
        if not isinstance(operand.placement, (Replicated, PerMember)):
            raise Mismatch(operand, "a value that is equal on all members, or each member's own part")
    return PER_MEMBER


def transfer(use: LayoutUse, operands: Sequence[Operand]) -> Placement:
    """A value of one member -> the same on another member, or on all."""
    operand, source, target = operands[0], use.attributes["source"], use.attributes["target"]
    if holder(operand.placement) != source:
        raise Mismatch(operand, f"a value on member {source}, which sends it")
    return REPLICATED if target < 0 else OnMember(target)


LAYOUTS: dict[str, Callable[[LayoutUse, Sequence[Operand]], Placement]] = {
    "LocalSlice": local_slice,
    "ShardSlice": shard_slice,
    "LocalConcat": local_concat,
    "Select": select,
    "DimSlice": dim_slice,
    "Transfer": transfer,
    "MemberGather": member_choice,
    "MemberGatherElements": member_choice,
    "MemberScatterElements": member_choice,
    "MemberScatterND": member_choice,
    **dict.fromkeys(["HaloStrips", "HaloJoin", "HaloSum", "MemberMaxPool", "WindowScatter"], member_choice),
}
"""Operator of ``gopt.spmd`` -> its rule."""
