"""Collectives as conversions between placements, along one axis of the group.

A call from a pass must convert something; a call of the source is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gopt.records.placements import (
    FLAG_COUNT,
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    Partial,
    PerMember,
    Placement,
    Replicated,
    Shard,
    holder,
)
from gopt.spmd.rules import Mismatch, Operand


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """One use of a collective, along an axis of the group.

    ``alone``: no other axis of the group has several members, so that places in the group are places along the axis.
    ``own``: a pass made the call, and not the source.
    """

    op_type: str
    attributes: Mapping[str, Any]
    alone: bool = True
    own: bool = True
    statistic: bool = False
    """The call makes new running statistics, the same for all from any member, or gathers rows that they keep."""

    @property
    def reduce(self) -> str:
        return str(self.attributes.get("reduce", "sum"))


Rule = Callable[[CollectiveUse, Operand], Placement]


def convert(call: CollectiveUse, operand: Operand) -> Placement:
    """Return the placement of a call's result for an operand; raises Mismatch."""
    return CONVERSIONS.get(call.op_type, _own)(call, operand)


def _own(call: CollectiveUse, operand: Operand) -> Placement:
    """A call without known properties: every member has its own value."""
    if not isinstance(operand.placement, (Replicated, PerMember)):
        raise Mismatch(operand, "a whole value of each member")
    return PER_MEMBER


def beside(call: CollectiveUse, operand: Operand, moved: bool) -> Placement:
    """Return the placement along an axis outside the call's group.

    ``moved``: the call changes the value along its own axes. A reduction passes through terms only if the two
    reductions commute.
    """
    part = operand.placement
    if isinstance(part, Partial) and moved and "Reduce" in call.op_type:
        linear = {"sum", "mean"}
        if part.op != call.reduce and not {part.op, call.reduce} <= linear:
            raise Mismatch(operand, f"terms of a {call.reduce}: a {call.reduce} of terms of a {part.op} is not a term")
    return part


def _reducible(call: CollectiveUse, operand: Operand) -> None:
    """Refuse operands for which a reduction over members would count twice, or would add up across places."""
    placement = operand.placement
    if isinstance(placement, Partial):
        if placement.on is not None:
            raise Mismatch(operand, "terms that all members have")
        if placement.op != call.reduce:
            raise Mismatch(operand, f"terms of a {call.reduce}")
    elif isinstance(placement, Replicated):
        # The mean, maximum and minimum of equal values are that value; their sum is a multiple of it.
        if call.own and call.reduce == "sum":
            raise Mismatch(operand, "values that differ between members: it is reduced already")
    elif not isinstance(placement, PerMember):
        raise Mismatch(operand, "a whole value of each member, or terms of one")


def all_reduce(call: CollectiveUse, operand: Operand) -> Placement:
    """Each member's own, or terms -> replicated. A sum of flags is not a flag: it is their number."""
    if operand.placement == Partial("count") and call.reduce == "sum":
        return FLAG_COUNT
    _reducible(call, operand)
    return REPLICATED


def reduce(call: CollectiveUse, operand: Operand) -> Placement:
    """The same -> on the root alone."""
    _reducible(call, operand)
    if call.own and not call.alone:
        raise Mismatch(operand, "a group of one axis: the root of several is not a member of one")
    return OnMember(int(call.attributes["root"])) if call.alone else PER_MEMBER


def reduce_scatter(call: CollectiveUse, operand: Operand) -> Placement:
    """The same -> sharded; each member's own where the source shards a dimension: the types are local."""
    _reducible(call, operand)
    if not call.alone or not (call.own or "cuts" in call.attributes):
        return PER_MEMBER
    if "cuts" in call.attributes:
        return FlatShard.whole(tuple(call.attributes["cuts"]))
    return Shard(int(call.attributes["axis"]), tuple(call.attributes["sizes"]))


def all_gather(call: CollectiveUse, operand: Operand) -> Placement:
    """Sharded -> replicated; the shards must match the attributes of the call.

    In a source, members' own values and rows kept by statistics may be concatenated too.
    """
    placement = operand.placement
    if isinstance(placement, FlatShard):
        if not call.alone or placement != FlatShard.whole(tuple(call.attributes.get("cuts", (0,)))):
            raise Mismatch(operand, f"shards that lie as its cuts say, {list(call.attributes.get('cuts', ()))}")
    elif isinstance(placement, Shard):
        shard = Shard(int(call.attributes.get("axis", -1)), tuple(call.attributes.get("sizes", ())))
        if placement != shard:
            raise Mismatch(operand, f"a value {shard}")
    elif isinstance(placement, (Partial, OnMember)) or (call.own and not _own_rows(call, placement)):
        raise Mismatch(operand, "shards")
    return REPLICATED


def _own_rows(call: CollectiveUse, placement: Placement) -> bool:
    return call.statistic and isinstance(placement, PerMember) and "axis" in call.attributes


def broadcast(call: CollectiveUse, operand: Operand) -> Placement:
    """Value on the root -> replicated.

    A member's own data keep the placement: broadcasting reduces nothing. Running statistics may come from any member,
    because no gradient reads running statistics.
    """
    placement = operand.placement
    if isinstance(placement, Replicated):
        return REPLICATED
    if call.alone and holder(placement) == call.attributes["root"]:
        return REPLICATED
    if call.statistic and isinstance(placement, PerMember):
        return REPLICATED
    if call.own or not isinstance(placement, PerMember):
        raise Mismatch(operand, f"a value on member {call.attributes['root']}")
    return PER_MEMBER


def all_to_all(call: CollectiveUse, operand: Operand) -> Placement:
    """Sharded along a dimension -> along another; members' own values stay own values."""
    placement = operand.placement
    at = call.attributes
    if call.alone and placement == Shard(int(at["concat_axis"]), tuple(at["concat_sizes"])):
        return Shard(int(at["split_axis"]), tuple(at["split_sizes"]))
    if not isinstance(placement, (Replicated, PerMember)):
        raise Mismatch(operand, f"a value sharded along dimension {at['concat_axis']} in {list(at['concat_sizes'])}")
    return PER_MEMBER


CONVERSIONS: dict[str, Rule] = {
    "AllReduce": all_reduce,
    "Reduce": reduce,
    "ReduceScatter": reduce_scatter,
    "AllGather": all_gather,
    "Broadcast": broadcast,
    "AllToAll": all_to_all,
}
"""Collective -> what it converts."""
