"""Windows on one rank: which ranks share nodes, and what a pool counts."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.ir.graph import SPMD, Node
from gopt.ir.types import TensorType
from gopt.lower.halo_operators import HALO_OPERATORS, lowest
from gopt.lower.lowered import LoweringContext
from gopt.spmd.halo import Halo

HALO = Halo((11, 11, 11, 11), ((-1, 12), (10, 23), (21, 34), (32, 45)))


def lowered(op_type: str, member: int, **attributes: object):
    fields = {"group": "h", "axis": 0, "border": "zeros", **HALO.attributes, **attributes}
    node = Node(op_type, ["x", "strips"], ["y"], domain=SPMD, attributes=fields)
    types = {"x": TensorType("float32", (11, 3)), "strips": TensorType("float32", (6, 3))}
    return HALO_OPERATORS[op_type](node, LoweringContext({"h": member}, frozenset(), types))


def kinds(member: int) -> list[str]:
    return [node.op_type for node in lowered("HaloJoin", member).nodes()]


def test_members_between_others_share_their_nodes():
    """Offsets are constants, which are the rank's own."""
    first, second, third, last = (lowered("HaloJoin", member) for member in range(4))
    assert second.variant == third.variant
    assert len({first.variant, second.variant, last.variant}) == 3
    assert second.constants != third.constants
    assert kinds(0) == ["ConstantOfShape", "Slice", "Slice", "Concat"]
    assert kinds(1) == ["Slice", "Slice", "Slice", "Concat"]


def test_who_hands_out_nothing_makes_an_empty_strip():
    made = lowered("HaloStrips", 1, **Halo((2, 2), ((0, 2), (1, 4))).attributes)
    assert [node.op_type for node in made.nodes()] == ["Slice", "Identity"]
    bounds = [made.constants[f"gopt.tensor-parallel.y.strip0.{end}"].item() for end in ("start", "stop")]
    assert bounds == [0, 0]


def test_a_window_that_is_the_part_is_a_value_of_its_own():
    """An alias would take its name from a result of the step."""
    made = lowered("HaloJoin", 0, **Halo((11, 3), ((0, 11), (10, 14))).attributes)
    assert [node.op_type for node in made.nodes()] == ["Identity"]
    assert not made.alias


@pytest.mark.parametrize(("dtype", "casts"), [("float32", 0), ("float16", 3), ("bfloat16", 3)])
def test_terms_of_halves_are_added_in_float32(dtype, casts):
    fields = {"group": "h", "axis": 0, **Halo((2, 2), ((0, 3), (2, 4)), "sum").attributes}
    node = Node("HaloSum", ["x", "strips"], ["y"], domain=SPMD, attributes=fields)
    types = {"x": TensorType(dtype, (2, 3)), "strips": TensorType(dtype, (1, 3))}
    made = HALO_OPERATORS["HaloSum"](node, LoweringContext({"h": 1}, frozenset(), types)).nodes()
    kinds = [each.op_type for each in made]
    assert kinds.count("Sum") == 1
    assert kinds.count("Cast") == casts


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8"])
def test_nothing_is_lower(dtype):
    value = lowest(dtype)
    assert value.dtype == dtype
    assert value[0] == (-np.inf if dtype.startswith("float") else np.iinfo(dtype).min)


def test_places_of_a_window_count_through_the_whole():
    """Row 2 of a window that begins at row 9 is row 11, in every plane."""
    given = {"kernel_shape": [1], "group": "h", "axis": 2, "ranges": [0, 10, 9, 14], "length": 14}
    node = Node("MemberMaxPool", ["x"], ["y", "at"], domain=SPMD, attributes=given)
    types = {"x": TensorType("float32", (2, 1, 5))}
    made = HALO_OPERATORS["MemberMaxPool"](node, LoweringContext({"h": 1}, frozenset(), types))
    pool, *rest = made.nodes()
    assert (pool.op_type, pool.attributes) == ("MaxPool", {"kernel_shape": [1]})
    values = {pool.outputs[1]: np.array([2, 5 + 2]), **made.constants}
    run = {"Div": np.floor_divide, "Mul": np.multiply, "Sub": np.subtract, "Add": np.add}
    for each in rest:
        values[each.outputs[0]] = run[each.op_type](*(values[name] for name in each.inputs))
    assert values["at"].tolist() == [11, 14 + 11]
