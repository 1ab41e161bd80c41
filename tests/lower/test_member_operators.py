"""Operators on a member's part of a dimension, for all members, against NumPy on the whole."""

from __future__ import annotations

import numpy as np
import pytest
from lowered_nodes import run
from placement_numbers import type_of

from gopt.ir.graph import SPMD, Node
from gopt.ir.types import TensorType
from gopt.lower.lowered import LoweringContext
from gopt.lower.member_operators import MEMBER_OPERATORS

SIZES = ((4, 3), (3, 0, 4), (0, 7), (1, 2, 4))
GENERATOR = np.random.default_rng(3)


def member(op_type: str, sizes: tuple[int, ...], at: int, values: list[np.ndarray], **attributes: object) -> np.ndarray:
    """What a member makes of its part of operand 0, and of whole other operands."""
    axis = int(attributes.get("axis", 0)) % values[0].ndim
    names = [f"x{place}" for place in range(len(values))]
    start = sum(sizes[:at])
    part = values[0] if op_type == "DimSlice" else values[0].take(range(start, start + sizes[at]), axis)
    known = dict(zip(names, [part, *values[1:]]))
    shape = expected_shape(op_type, part, values, axis)
    types = {name: type_of(each) for name, each in known.items()} | {"out": TensorType(type_of(part).dtype, shape)}
    node = Node(op_type, names, ["out"], domain=SPMD, attributes={**attributes, "group": "tp", "sizes": list(sizes)})
    lowered = MEMBER_OPERATORS[op_type](node, LoweringContext({"tp": at}, frozenset(), types))
    known |= lowered.constants
    before = {name: each.copy() for name, each in known.items()}
    made = run(lowered, known)
    assert all((known[name] == each).all() for name, each in before.items()), "no operand is written to"
    return made


def expected_shape(op_type: str, part: np.ndarray, values: list[np.ndarray], axis: int) -> tuple[int, ...]:
    if op_type == "MemberGather":
        return (*part.shape[:axis], *values[1].shape, *part.shape[axis + 1 :])
    return values[1].shape if op_type == "MemberGatherElements" else part.shape


def places(length: int, *shape: int, dtype: str = "int64") -> np.ndarray:
    """Indices, some from the end, some twice."""
    return GENERATOR.integers(-length, length, shape).astype(dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_is_the_members_part(sizes, axis):
    whole = GENERATOR.standard_normal((7, 7))
    parts = [member("DimSlice", sizes, at, [whole], axis=axis) for at in range(len(sizes))]
    assert [each.shape[axis] for each in parts] == list(sizes)
    assert (np.concatenate(parts, axis) == whole).all()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_rows_that_are_gathered_add_up(sizes, axis, shape, dtype):
    data, indices = GENERATOR.standard_normal((7, 7)).astype(np.float32), places(7, *shape, dtype=dtype)
    parts = [member("MemberGather", sizes, at, [data, indices], axis=axis) for at in range(len(sizes))]
    assert (sum(parts) == data.take(indices, axis)).all()
    assert ((np.stack(parts) != 0).sum(0) == 1).all(), "one member has each row, the others have zeros"


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axis", [0, -1])
def test_elements_that_are_gathered_add_up(sizes, axis):
    data, indices = GENERATOR.standard_normal((7, 7)).astype(np.float32), places(7, 7, 7)
    parts = [member("MemberGatherElements", sizes, at, [data, indices], axis=axis) for at in range(len(sizes))]
    assert (sum(parts) == np.take_along_axis(data, indices % 7, axis)).all()


COMBINE = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_elements_are_scattered_to_the_member_that_has_them(sizes, reduction, axis, dtype):
    data = GENERATOR.integers(-9, 9, (7, 7)).astype(dtype)
    indices = np.stack([GENERATOR.permutation(7)[:3] for _ in range(7)], 0 if axis else 1)
    indices -= 7 * GENERATOR.integers(0, 2, indices.shape)
    updates = GENERATOR.integers(-9, 9, indices.shape).astype(dtype)
    if reduction != "none":
        indices = places(7, *indices.shape)
    whole = data.copy()
    for at in np.ndindex(indices.shape):
        place = (indices[at] % 7, at[1]) if axis == 0 else (at[0], indices[at] % 7)
        combine = COMBINE[reduction]
        whole[place] = updates[at] if combine is None else combine(whole[place], updates[at])
    given, more = [data, indices, updates], {} if reduction == "none" else {"reduction": reduction}
    parts = [member("MemberScatterElements", sizes, at, given, axis=axis, **more) for at in range(len(sizes))]
    made = np.concatenate(parts, axis)
    assert made.dtype == data.dtype
    assert (made == whole).all()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reduction", COMBINE)
@pytest.mark.parametrize("rest", [(), (2,), (2, 3)])
def test_rows_are_scattered_to_the_member_that_has_them(sizes, reduction, rest):
    data = GENERATOR.integers(-9, 9, (7, *rest)).astype(np.float32)
    count = GENERATOR.permutation(7)[:4].reshape(2, 2) if reduction == "none" else places(7, 2, 3)
    updates = GENERATOR.integers(-9, 9, (*count.shape, *rest)).astype(np.float32)
    whole = data.copy()
    for at in np.ndindex(count.shape):
        combine = COMBINE[reduction]
        whole[count[at]] = updates[at] if combine is None else combine(whole[count[at]], updates[at])
    given, more = [data, count[..., None], updates], {} if reduction == "none" else {"reduction": reduction}
    parts = [member("MemberScatterND", sizes, at, given, axis=0, **more) for at in range(len(sizes))]
    assert (np.concatenate(parts) == whole).all()


def test_of_two_updates_of_one_place_the_later_wins():
    data, indices, updates = np.zeros(7, np.float32), np.array([2, -5, 2, 6]), np.array([1, 2, 3, 4], np.float32)
    given = [data, indices, updates]
    parts = [member("MemberScatterElements", (2, 3, 2), at, given, axis=0) for at in range(3)]
    assert np.concatenate(parts).tolist() == [0, 0, 3, 0, 0, 0, 4]


def test_others_updates_leave_infinity_alone():
    """A product with others' zeros or infinities would not."""
    data = np.array([np.inf, 1, 2, 3], np.float32)
    given = [data, np.array([3, 3]), np.array([0, 0], np.float32)]
    first = member("MemberScatterElements", (2, 2), 0, given, axis=0, reduction="mul")
    assert first.tolist() == [np.inf, 1]


def test_a_member_without_part_has_nothing_to_do():
    types = {name: TensorType("float32", (0, 3)) for name in ("x0", "out")}
    node = Node("MemberScatterND", ["x0", "x1", "x2"], ["out"], domain=SPMD, attributes={"group": "tp", "sizes": [0, 7],
                "axis": 0})  # fmt: skip
    (made,) = MEMBER_OPERATORS["MemberScatterND"](node, LoweringContext({"tp": 0}, frozenset(), types)).nodes()
    assert (made.op_type, made.inputs, made.outputs) == ("Identity", ["x0"], ["out"]), (
        "not an alias: ranks share readers"
    )
