"""Every collective, one record each: the dialect ``gopt.comm`` (contract section 5). The only list of collectives."""

from __future__ import annotations

from types import MappingProxyType

from gopt.collectives import reference, rules
from gopt.collectives.call import Attribute, CallKind
from gopt.collectives.spec import Collective

_GROUP = Attribute("group", CallKind.STRING, "Mesh axes in mesh order, such as shard or dp+shard.", required=True)
_REDUCE = Attribute(
    "reduce", CallKind.STRING, "How elements are combined.", default="sum", choices=("sum", "mean", "max", "min")
)
_ROOT = Attribute("root", CallKind.INT, "Index of the root in the group.", required=True)
_PEER = Attribute("peer", CallKind.INT, "Rank of the other end.", required=True)
_TAG = Attribute("tag", CallKind.INT, "Pairs a Send with the Recv of the same tag, in file order.", required=True)
_DTYPE = Attribute("dtype", CallKind.STRING, "Element type, such as float16.", required=True)
_SHAPES = Attribute(
    "shapes", CallKind.STRINGS, 'Shapes of the outputs, such as "64,32"; a scalar is "".', required=True
)
_CUTS = Attribute("cuts", CallKind.INTS, "Element offsets that share the bucket out, one more than members.")
_TENSORS = Attribute("shapes", CallKind.STRINGS, "Shapes into which the bucket is cut up, as for Broadcast.")
_AXIS = Attribute("axis", CallKind.INT, "Axis along which slices are taken or joined, from 0.")
_SIZES = Attribute("sizes", CallKind.INTS, "Length of each member's slice of the axis.")
_SPLIT_AXIS = Attribute("split_axis", CallKind.INT, "Axis of X that is shared out among the members.", required=True)
_CONCAT_AXIS = Attribute("concat_axis", CallKind.INT, "Another axis, along which the pieces are joined.", required=True)
_SPLIT_SIZES = Attribute("split_sizes", CallKind.INTS, "Each member's part of the split axis of Y.", required=True)
_CONCAT_SIZES = Attribute("concat_sizes", CallKind.INTS, "Each member's part of the concat axis of X.", required=True)

ALL_REDUCE = Collective(
    name="AllReduce", doc="The X of all members combined, on every member; all tensors as one packed call.",
    attributes=(_GROUP, _REDUCE), shape_rule=rules.same, payload_rule=rules.same, cost_rule=rules.ring_twice,
    reference=reference.all_reduce, rounds=2,
)  # fmt: skip

REDUCE = Collective(
    name="Reduce",
    doc="The X of all members combined, on the root alone; elsewhere Y is undefined and nothing may read it.",
    attributes=(_GROUP, _REDUCE, _ROOT), shape_rule=rules.same, payload_rule=rules.same, cost_rule=rules.ring,
    reference=reference.reduce,
)  # fmt: skip

BROADCAST = Collective(
    name="Broadcast", doc="The root's X on every member. Members other than the root give no input.",
    attributes=(_GROUP, _ROOT, _DTYPE, _SHAPES), shape_rule=rules.broadcast, payload_rule=rules.stated,
    cost_rule=rules.ring, reference=reference.broadcast, min_inputs=0,
)  # fmt: skip

REDUCE_SCATTER = Collective(
    name="ReduceScatter",
    doc="The bucket X combined: member r gets its elements cuts[r] to cuts[r+1], or its slice of the axis.",
    attributes=(_GROUP, _REDUCE, _CUTS, _AXIS, _SIZES), forms=(frozenset({"cuts"}), frozenset({"axis", "sizes"})),
    shape_rule=rules.reduce_scatter, payload_rule=rules.same, cost_rule=rules.all_but_own,
    reference=reference.reduce_scatter, max_outputs=1, shares=True,
)  # fmt: skip

ALL_GATHER = Collective(
    name="AllGather",
    doc="The members' shards joined, cut up into the shapes; or the members' slices joined along the axis.",
    attributes=(_GROUP, _CUTS, _TENSORS, _AXIS, _SIZES),
    forms=(frozenset({"cuts", "shapes"}), frozenset({"axis", "sizes"})), shape_rule=rules.all_gather,
    payload_rule=rules.all_gather, cost_rule=rules.all_but_own, reference=reference.all_gather, max_inputs=1,
)  # fmt: skip

ALL_TO_ALL = Collective(
    name="AllToAll",
    doc="A tensor shared out along concat_axis becomes shared out along split_axis: member r sends part s of the "
    "split axis to member s, and joins what it receives along the concat axis in group order.",
    attributes=(_GROUP, _SPLIT_AXIS, _CONCAT_AXIS, _SPLIT_SIZES, _CONCAT_SIZES),
    shape_rule=rules.all_to_all,
    payload_rule=rules.exchanged,
    cost_rule=rules.exchange,
    reference=reference.all_to_all,
    max_inputs=1,
    max_outputs=1,
    shares=True,
)

SEND = Collective(
    name="Send", doc="Hands X to the peer, which has a Recv of the same tag.", attributes=(_GROUP, _PEER, _TAG),
    shape_rule=rules.nothing, payload_rule=rules.same, cost_rule=rules.everything, reference=reference.transfer,
    min_outputs=0, max_outputs=0, pairwise=True,
)  # fmt: skip

RECV = Collective(
    name="Recv", doc="Takes what the peer's Send of the same tag gives.",
    attributes=(_GROUP, _PEER, _TAG, _DTYPE, _SHAPES), shape_rule=rules.stated, payload_rule=rules.stated,
    cost_rule=rules.free, reference=reference.transfer, min_inputs=0, max_inputs=0, pairwise=True,
)  # fmt: skip

_ALL = (ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, SEND, RECV)

COLLECTIVES: MappingProxyType[str, Collective] = MappingProxyType({record.name: record for record in _ALL})
"""Operator type -> its record; read-only."""
