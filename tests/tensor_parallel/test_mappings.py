"""What one axis sees of the mappings of others."""

from __future__ import annotations

import pytest

from gopt.ir.graph import COMM, SPMD, Node
from gopt.records.placements import REPLICATED, Partial, Shard
from gopt.spmd.rules import Mismatch, Operand
from gopt.tensor_parallel.mappings import beside, is_mapping


def call(op_type: str, domain: str = COMM, **attributes) -> Node:
    return Node(op_type, ["x"], ["y"], domain=domain, attributes={"group": "tp", **attributes})


@pytest.mark.parametrize("op_type", ["AllGather", "AllToAll", "AllReduce", "ReduceScatter"])
def test_a_value_is_placed_behind_a_mapping_as_in_front(op_type):
    for placement in (REPLICATED, Shard(1, (2, 2)), Partial("sum")):
        assert beside(call(op_type), Operand("x", placement)) == placement


def test_terms_of_another_kind_do_not_pass_a_reduction():
    with pytest.raises(Mismatch, match="terms of a max"):
        beside(call("AllReduce", reduce="max"), Operand("x", Partial("sum")))
    assert beside(call("AllReduce", reduce="mean"), Operand("x", Partial("sum"))) == Partial("sum")
    assert beside(call("AllGather"), Operand("x", Partial("max"))) == Partial("max")


def test_calls_of_the_source_are_no_mappings():
    assert is_mapping(call("AllReduce"), {"tp", "cp"}) and is_mapping(call("DimSlice", SPMD), {"tp"})
    assert not is_mapping(call("AllReduce", group="dp"), {"tp", "cp"})
    assert not is_mapping(call("MemberGather", SPMD), {"tp"})
