"""The layout operators by numbers: what ``specialise`` writes for them makes what their rules say."""

from __future__ import annotations

import numpy as np
import pytest
from chunks import Chunks, agrees, take_apart
from lowered_nodes import run

from gopt.ir.graph import SPMD, Node
from gopt.ir.types import TensorType
from gopt.lower.layout_operators import LOWERED, LoweringContext
from gopt.records.placements import (
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    Partial,
    Place,
    Placement,
    Shard,
    Sharding,
    Window,
    WindowTerms,
)
from gopt.spmd.halo import Halo
from gopt.spmd.layouts import LAYOUTS, LayoutUse, identity, lay
from gopt.spmd.rules import Mismatch, Operand

CUTS = (0, 4, 4, 9, 12)
WHOLE = FlatShard.whole(CUTS)


def made(op_type: str, *placements: Placement, place: Place = WHOLE, **attributes: object) -> Placement:
    operands = [Operand(f"x{number}", each) for number, each in enumerate(placements)]
    return lay(LayoutUse(op_type, attributes, place, 4), operands)


def refused(
    expected: str, op_type: str, *placements: Placement, place: Place = WHOLE, name: str = "x", **attributes: object
) -> None:
    """``name``: how the name of the operand begins that the refusal is about."""
    with pytest.raises(Mismatch) as caught:
        made(op_type, *placements, place=place, **attributes)
    assert expected in caught.value.expected
    assert caught.value.operand.name.startswith(name)


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
        here = LoweringContext(
            {"shard": member}, frozenset(present), types | {"out": TensorType("float64", whole.shape)}
        )
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
        chunks.append(
            run(LOWERED["DimSlice"](node, LoweringContext({"shard": member}, frozenset({"x0"}), types)), {"x0": whole})
        )
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
    refused("a shard that holds on member 1 alone", "ShardSlice", WHOLE, place=OnMember(1))


def test_neighbours_join():
    assert made("LocalConcat", FlatShard(CUTS, 0, 3), FlatShard(CUTS, 3, 12)) == WHOLE
    first, second, third = (FlatShard(CUTS, *part) for part in ((0, 3), (3, 8), (8, 12)))
    refused("the part of the bucket behind", "LocalConcat", first, FlatShard(CUTS, 4, 12), name="x1")
    refused("the part of the bucket behind", "LocalConcat", FlatShard(CUTS, 3, 12), first, name="x1")
    refused(f"the part of the bucket behind {second}", "LocalConcat", first, second, FlatShard(CUTS, 9, 12), name="x2")
    refused("the part of the bucket behind", "LocalConcat", first, second, FlatShard((0, 3, 6, 9, 12), 8, 12))
    assert made("LocalConcat", first, second, third) == WHOLE
    assert made("LocalConcat", second, third) == FlatShard(CUTS, 3, 12)


def test_whole_tensors_join_in_the_order_of_their_members():
    owned = (OnMember(0), OnMember(2), OnMember(2), OnMember(3))
    assert made("LocalConcat", *owned, sizes=[4, 3, 2, 3]) == WHOLE
    refused("in the order of their members", "LocalConcat", OnMember(1), OnMember(0), sizes=[1, 1])
    refused("each lie on one member", "LocalConcat", OnMember(0), REPLICATED, sizes=[1, 1])
    refused("each lie on one member", "LocalConcat", OnMember(0), FlatShard(CUTS, 4, 12), sizes=[4, 8])


def test_a_transfer_takes_a_value_from_one_member_to_another_or_to_all():
    assert made("Transfer", OnMember(2), source=2, target=0) == OnMember(0)
    assert made("Transfer", OnMember(2), source=2, target=-1) == REPLICATED
    refused("a value on member 1, which sends it", "Transfer", OnMember(2), source=1, target=0)
    refused("a value on member 1, which sends it", "Transfer", REPLICATED, source=1, target=0)


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


CHOICES = sorted(set(LAYOUTS) - {"LocalSlice", "ShardSlice", "LocalConcat", "Select", "DimSlice", "Transfer"})
"""Operators on a member's part of a dimension, or on a window of it."""


@pytest.mark.parametrize("op_type", CHOICES)
def test_a_choice_takes_parts_and_makes_each_member_something_of_its_own(op_type):
    assert made(op_type, PER_MEMBER, REPLICATED, place=REPLICATED) == PER_MEMBER
    assert made(op_type, REPLICATED, place=REPLICATED) == PER_MEMBER
    for given in (Partial("sum"), OnMember(1), WHOLE):
        refused("equal on all members, or each member's own part", op_type, PER_MEMBER, given, name="x1")


SIZES = ((3, 4), (2, 0, 5), (0, 7), (1, 2, 1, 3))
TABLE = np.arange(1.0, 22.0).reshape(7, 3)
PLACES = np.array([[6, -7, 2], [3, 3, -1]])


def on_members(op_type: str, values: list[list[np.ndarray]], dims: list[tuple[int, ...]], **attributes: object):
    """What each member makes of its values; ``dims``: the shape of what it makes."""
    names, found = [f"x{number}" for number in range(len(values[0]))], list[np.ndarray]()
    node = Node(op_type, names, ["out"], domain=SPMD, made_by="test", attributes={"group": "shard", **attributes})
    for member, given in enumerate(values):
        types = {name: TensorType(str(value.dtype), value.shape) for name, value in zip(names, given)}
        types["out"] = TensorType(str(given[0].dtype), dims[member])
        here = LoweringContext({"shard": member}, frozenset(names), types)
        found.append(run(LOWERED[op_type](node, here), dict(zip(names, given))))
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_gathered_of_parts_are_terms(sizes):
    """Each member's own: zeros for the rows of others. Their sum is what the whole table gives."""
    parts = [TABLE[slice(*Shard(0, sizes).part(member))] for member in range(len(sizes))]
    rows = on_members("MemberGather", [[part, PLACES] for part in parts], [(2, 3, 3)] * len(sizes), axis=0, sizes=sizes)
    assert agrees(list(rows), Partial("sum"), TABLE[PLACES])
    elements = [[part, PLACES] for part in parts]
    chosen = on_members("MemberGatherElements", elements, [(2, 3)] * len(sizes), axis=0, sizes=sizes)
    assert agrees(list(chosen), Partial("sum"), np.take_along_axis(TABLE, PLACES % 7, 0))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_what_is_scattered_into_parts_are_parts(sizes, reduction):
    parts = [TABLE[slice(*Shard(0, sizes).part(member))] for member in range(len(sizes))]
    dims = [part.shape for part in parts]
    rows, updates = np.array([[5], [-7]]), np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    whole = TABLE.copy()
    whole[[5, 0]] = updates if reduction == "none" else updates + whole[[5, 0]]
    more = {"axis": 0, "sizes": sizes, "reduction": reduction}
    made = on_members("MemberScatterND", [[part, rows, updates] for part in parts], dims, **more)
    assert agrees(list(made), Shard(0, sizes), whole)
    everywhere = np.repeat(rows, 3, 1)
    made = on_members("MemberScatterElements", [[part, everywhere, updates] for part in parts], dims, **more)
    assert agrees(list(made), Shard(0, sizes), whole)


@pytest.mark.parametrize("sizes", SIZES)
def test_windows_are_joined_of_parts_and_strips_and_their_terms_are_summed(sizes):
    """A window reaches one place beyond the part on both sides; beside the dimension there are zeros."""
    members, shard = range(len(sizes)), Shard(0, sizes)
    ranges = tuple((start - 1, stop + 1) for start, stop in map(shard.part, members))
    window = Window(0, ranges, 7)
    padded = np.concatenate([np.zeros((1, 3)), TABLE, np.zeros((1, 3))])
    windows = [padded[start + 1 : stop + 1] for start, stop in ranges]
    parts = [TABLE[slice(*shard.part(member))] for member in members]
    halo = {"axis": 0, "border": "zeros", **Halo(sizes, ranges).attributes}
    strips = np.concatenate(on_members("HaloStrips", [[part] for part in parts], [(0, 3)] * len(sizes), **halo))
    dims = [(window.local(member), 3) for member in members]
    joined = on_members("HaloJoin", [[part, strips] for part in parts], dims, **halo)
    assert [each.tolist() for each in joined] == [each.tolist() for each in windows]
    terms, total = WindowTerms(0, ranges, 7), np.zeros((9, 3))
    for member, (start, stop) in enumerate(terms.ranges):
        total[start + 1 : stop + 1] += (member + 1) * windows[member]
    given = [(member + 1) * windows[member] for member in members]
    back = {"axis": 0, **Halo(sizes, ranges, "sum").attributes}
    strips = np.concatenate(on_members("HaloStrips", [[each] for each in given], [(0, 3)] * len(sizes), **back))
    summed = on_members("HaloSum", [[each, strips] for each in given], [(size, 3) for size in sizes], **back)
    assert agrees(list(summed), shard, total[1:-1])
