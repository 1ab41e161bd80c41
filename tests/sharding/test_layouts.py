"""The layout operators by numbers: what ``specialise`` writes for them makes what their rules say."""

from __future__ import annotations

import numpy as np
import pytest
from chunks import Chunks, agrees, take_apart
from lowered_nodes import run

from gopt.ir.graph import SPMD, Node
from gopt.ir.types import TensorType
from gopt.lower.layout_operators import LOWERED, Here
from gopt.sharding.layouts import LAYOUTS, Layout, identity, lay
from gopt.sharding.placements import PER_MEMBER, REPLICATED, FlatShard, OnMember, Partial, Placement, Shard, Sharding
from gopt.sharding.rules import Mismatch, Operand

CUTS = (0, 4, 4, 9, 12)
WHOLE = FlatShard.whole(CUTS)


def made(op_type: str, *placements: Placement, place: FlatShard = WHOLE, **attributes: object) -> Placement:
    operands = [Operand(f"x{number}", each) for number, each in enumerate(placements)]
    return lay(Layout(op_type, attributes, place, 4), operands)


def refused(expected: str, op_type: str, *placements: Placement, place: FlatShard = WHOLE, **attributes: object):
    with pytest.raises(Mismatch) as caught:
        made(op_type, *placements, place=place, **attributes)
    assert expected in caught.value.expected


BUCKET = np.arange(1.0, 13.0)
FIRST, SECOND, THIRD = BUCKET[:3], BUCKET[3:8], BUCKET[8:]
Row = tuple[str, list[tuple[np.ndarray, Placement]], np.ndarray, FlatShard, dict[str, object]]
ROWS: list[Row] = [
    ("LocalSlice", [(FIRST, REPLICATED), (SECOND, REPLICATED), (THIRD, REPLICATED)], BUCKET, WHOLE,
     {"starts": [0, 3, 8], "sizes": [3, 5, 4]}),
    ("LocalSlice", [(SECOND, REPLICATED)], SECOND, FlatShard(CUTS, 3, 8), {"starts": [3], "sizes": [5]}),
    ("ShardSlice", [(BUCKET, WHOLE)], SECOND, FlatShard(CUTS, 3, 8), {}),
    ("ShardSlice", [(BUCKET, WHOLE)], THIRD, FlatShard(CUTS, 8, 12), {}),
    ("LocalConcat", [(FIRST, FlatShard(CUTS, 0, 3)), (BUCKET[3:], FlatShard(CUTS, 3, 12))], BUCKET, WHOLE, {}),
    ("LocalConcat", [(BUCKET[:4], OnMember(0)), (BUCKET[4:9], OnMember(2)), (BUCKET[9:], OnMember(3))], BUCKET, WHOLE,
     {"sizes": [4, 5, 3]}),
    *(("Select", [(np.array(2.5), OnMember(2))], np.array(2.5), WHOLE, {"reduce": op}) for op in ("sum", "max", "min")),
    ("Select", [(np.array(2.5), Partial("sum", WHOLE))], np.array(2.5), WHOLE, {"reduce": "sum"}),
    ("Select", [(np.array(2.5), Partial("max", WHOLE))], np.array(2.5), WHOLE, {"reduce": "max"}),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "operands", "whole", "place", "attributes"), ROWS, ids=str)
def test_what_members_make_is_what_the_rule_says(op_type, operands, whole, place, attributes):
    """Uneven cuts, and a member without elements."""
    generator, names = np.random.default_rng(2), [f"x{number}" for number in range(len(operands))]
    parts = [take_apart(value, placement, 4, generator) for value, placement in operands]
    node = Node(op_type, names, ["out"], domain=SPMD, attributes={"group": "shard", **attributes}, made_by="test")
    node.sharding = Sharding.along("shard", place) if op_type.endswith("Slice") else node.sharding
    types = {name: TensorType("float64", value.shape) for name, (value, _) in zip(names, operands)}
    chunks: Chunks = []
    for member in range(4):
        has = {name: part[member] for name, part in zip(names, parts) if part[member] is not None}
        present = {name for name, (_, placement) in zip(names, operands) if placement.covers(member)}
        values = {name: has[name] for name in (has if op_type.endswith("Slice") else present)}
        here = Here({"shard": member}, frozenset(present), types | {"out": TensorType("float64", whole.shape)})
        runs = not op_type.endswith("Slice") or place.covers(member)
        chunks.append(run(LOWERED[op_type](node, here), values) if runs else None)
    assert agrees(chunks, made(op_type, *(each for _, each in operands), place=place, **attributes), whole)


@pytest.mark.parametrize("sizes", [(3, 3), (1, 0, 5), (0, 6)])
def test_parts_of_a_dimension_are_the_value(sizes):
    """What a DimSlice makes is each member's own for rules behind it: its part of the dimension."""
    whole, chunks = np.arange(12.0).reshape(6, 2), list[np.ndarray]()
    node = Node("DimSlice", ["x0"], ["out"], domain=SPMD, made_by="test")
    node.attributes.update({"group": "shard", "axis": 0, "sizes": list(sizes)})
    for member in range(len(sizes)):
        types = {"x0": TensorType("float64", (6, 2)), "out": TensorType("float64", (sizes[member], 2))}
        chunks.append(run(LOWERED["DimSlice"](node, Here({"shard": member}, frozenset({"x0"}), types)), {"x0": whole}))
    assert agrees(list(chunks), Shard(0, sizes), whole)


def test_local_cuts_what_all_members_have():
    assert made("LocalSlice", REPLICATED, REPLICATED) == WHOLE
    refused("equal on all members, to cut it", "LocalSlice", REPLICATED, PER_MEMBER)
    refused("equal on all members, to cut it", "LocalSlice", WHOLE)


def test_a_segment_lies_inside():
    inside = FlatShard(CUTS, 3, 10)
    assert made("ShardSlice", WHOLE, place=inside) == inside
    refused("a shard that holds", "ShardSlice", inside, place=WHOLE)
    refused("a shard that holds", "ShardSlice", FlatShard.whole((0, 3, 6, 9, 12)), place=inside)
    refused("a shard that holds", "ShardSlice", REPLICATED, place=inside)


def test_neighbours_join():
    assert made("LocalConcat", FlatShard(CUTS, 0, 3), FlatShard(CUTS, 3, 12)) == WHOLE
    refused("the part of the bucket behind", "LocalConcat", FlatShard(CUTS, 0, 3), FlatShard(CUTS, 4, 12))
    refused("the part of the bucket behind", "LocalConcat", FlatShard(CUTS, 3, 12), FlatShard(CUTS, 0, 3))


def test_whole_tensors_join_in_the_order_of_their_members():
    owned = (OnMember(0), OnMember(2), OnMember(2), OnMember(3))
    assert made("LocalConcat", *owned, sizes=[4, 3, 2, 3]) == WHOLE
    refused("in the order of their members", "LocalConcat", OnMember(1), OnMember(0), sizes=[1, 1])
    refused("each lie on one member", "LocalConcat", OnMember(0), REPLICATED, sizes=[1, 1])
    refused("each lie on one member", "LocalConcat", OnMember(0), FlatShard(CUTS, 4, 12), sizes=[4, 8])


def test_a_guard_makes_terms_that_all_have():
    assert made("Select", Partial("sum", WHOLE), reduce="sum") == Partial("sum")
    assert made("Select", OnMember(2), reduce="max") == Partial("max")
    refused("terms of a reduction by max", "Select", Partial("sum", WHOLE), reduce="max")
    refused("on one member", "Select", REPLICATED, reduce="sum")  # it would count once for every member
    refused("on one member", "Select", WHOLE, reduce="sum")
    refused("mean has no neutral element", "Select", OnMember(2), reduce="mean")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_the_identity_changes_no_reduction(dtype):
    values = np.array([-3, 0, 5]).astype(dtype)
    for op, reduce in (("sum", np.add.reduce), ("max", np.maximum.reduce), ("min", np.minimum.reduce)):
        none = np.array(identity(op, dtype), dtype)
        assert reduce(np.append(values, none)) == reduce(values)
        assert reduce(np.append(values[:1], none)) == values[0]


def test_the_identity_of_flags():
    for flag in (True, False):
        assert (flag or bool(identity("any", "bool"))) == flag and (flag and bool(identity("all", "bool"))) == flag


def test_every_operator_has_a_rule():
    from gopt.lower.specialise import LOWERED

    assert set(LAYOUTS) == set(LOWERED)


def test_a_segment_may_be_all_of_a_shard():
    inside = FlatShard(CUTS, 3, 10)
    assert made("ShardSlice", inside, place=inside) == inside
    refused("a shard that holds", "ShardSlice", inside, place=FlatShard(CUTS, 2, 10))
    refused("a shard that holds", "ShardSlice", inside, place=FlatShard(CUTS, 3, 11))


def test_parts_of_a_dimension_are_cut_out_of_equal_values():
    assert made("DimSlice", REPLICATED) == PER_MEMBER
    refused("equal on all members, to cut it", "DimSlice", PER_MEMBER)
