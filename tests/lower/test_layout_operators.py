"""Layout operators on ranks: what the nodes of each rank make is its part of the whole, and ranks alike share them."""

from __future__ import annotations

import numpy as np
import pytest
from lowered_nodes import run

from gopt.ir.graph import SPMD, Node
from gopt.ir.types import TensorType
from gopt.lower.layout_operators import LOWERED, Lowered, LoweringContext
from gopt.records.placements import FULLY_REPLICATED, FlatShard, Sharding

CUTS = ((0, 4, 8, 12), (0, 0, 5, 12), (0, 12, 12, 12), (0, 1, 2, 12))
"""Even, uneven, one member with all, members with one element."""
SIZES = (3, 5, 4)
WHOLE = np.arange(12, dtype=np.float32)
STARTS = (0, 3, 8)
TENSORS = {f"t{number}": WHOLE[start : start + size] for number, (start, size) in enumerate(zip(STARTS, SIZES))}


def node(op_type: str, inputs: list[str], sharding: Sharding = FULLY_REPLICATED, **attributes: object) -> Node:
    return Node(op_type, inputs, ["out"], domain=SPMD, attributes=attributes, sharding=sharding, made_by="test")


def lower(layout: Node, member: int, present: set[str] = frozenset()) -> Lowered:
    types = {name: TensorType("float32", (12,)) for name in ("out", "shard", *TENSORS)}
    return LOWERED[layout.op_type](layout, LoweringContext({"shard": member}, present, types))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("first, last", [(0, 3), (1, 3), (1, 2), (0, 1)])
def test_a_local_slice_is_the_members_elements(cuts, first, last):
    start = STARTS[first]
    span = FlatShard(cuts, start, start + sum(SIZES[first:last]))
    names = list(TENSORS)[first:last]
    layout = node(
        "LocalSlice",
        names,
        Sharding.along("shard", span),
        starts=list(STARTS[first:last]),
        sizes=list(SIZES[first:last]),
    )
    for member in range(3):
        if span.covers(member):
            low, high = span.part(member)
            assert (
                run(lower(layout, member), {name: TENSORS[name] for name in names}).tolist() == WHOLE[low:high].tolist()
            )


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("start, stop", [(0, 12), (3, 8), (3, 12), (0, 3)])
def test_a_shard_slice_is_a_part_of_the_members_shard(cuts, start, stop):
    span = FlatShard(cuts, start, stop)
    layout = node("ShardSlice", ["shard"], Sharding.along("shard", span))
    for member in range(3):
        if span.covers(member):
            low, high = span.part(member)
            shard = WHOLE[cuts[member] : cuts[member + 1]]
            assert run(lower(layout, member), {"shard": shard}).tolist() == WHOLE[low:high].tolist()


@pytest.mark.parametrize("present", [[], ["t0"], ["t2"], ["t0", "t2"], ["t0", "t1", "t2"]])
def test_a_local_concat_is_what_the_rank_has(present):
    lowered = lower(node("LocalConcat", list(TENSORS), group="shard", sizes=list(SIZES)), 0, set(present))
    made = run(lowered, {name: TENSORS[name] for name in present})
    assert made.tolist() == [value for name in present for value in TENSORS[name].tolist()]
    assert made.dtype == np.float32


@pytest.mark.parametrize("reduce, neutral", [("sum", 0.0), ("max", -np.inf), ("min", np.inf)])
def test_a_select_changes_no_reduction(reduce, neutral):
    layout = node("Select", ["t0"], group="shard", reduce=reduce)
    assert run(lower(layout, 0, {"t0"}), TENSORS).tolist() == TENSORS["t0"].tolist()
    assert run(lower(layout, 0), {}) == np.float32(neutral)


def test_members_that_cut_alike_have_one_variant():
    span = FlatShard((0, 3, 6, 9, 12), 0, 12)
    layout = node("LocalSlice", ["one"], Sharding.along("shard", span), starts=[0], sizes=[12])
    found = [lower(layout, member) for member in range(4)]
    assert len({each.variant for each in found}) == 1
    assert [each.constants["gopt.tensor-parallel.out.start"].tolist() for each in found] == [[0], [3], [6], [9]]


def test_a_member_that_has_a_whole_tensor_is_another_variant():
    span = FlatShard((0, 3, 6, 12), 0, 12)
    sizes, starts = [3, 9], [0, 3]
    layout = node("LocalSlice", ["a", "b"], Sharding.along("shard", span), starts=starts, sizes=sizes)
    assert len({lower(layout, member).variant for member in range(3)}) == 2
