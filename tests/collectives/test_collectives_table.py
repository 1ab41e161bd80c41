"""Laws that hold for every collective of the table, over group sizes: a new record is tested on arrival."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from gopt.collectives.node import call_signature, flat_cuts, format_shape
from gopt.collectives.table import COLLECTIVES

SIZES = (1, 2, 3, 4, 8)
SHAPES = ((5, 3), (), (0, 4), (33,))
ELEMENTS = 49
NUMPY = {name: np.dtype(name) for name in ("float16", "float32", "float64", "int32")}
NUMPY["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


@dataclass
class Case:
    """A call on all members, and the bytes that each must send, in elements."""

    op: str
    attributes: dict[str, Any]
    given: list[list[np.ndarray]]
    sent: list[float]
    label: str = ""

    def types(self, dtype: str, member: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(dtype, array.shape) for array in self.given[member]]


def arrays(shapes: Any, size: int, dtype: str) -> list[list[np.ndarray]]:
    random = np.random.default_rng(7)
    return [[np.asarray(random.integers(-9, 9, shape)).astype(NUMPY[dtype]) for shape in shapes] for _ in range(size)]


def cases(n: int, dtype: str = "float32") -> list[Case]:
    """Every collective in every form, for a group of ``n``."""
    group = {"group": "shard"}
    texts = [format_shape(shape) for shape in SHAPES]
    bucket, ring = arrays(SHAPES, n, dtype), (n - 1) / n * ELEMENTS
    cuts = flat_cuts(ELEMENTS, n)
    lengths = [stop - start for start, stop in pairwise(cuts)]
    sizes = [3 * (member % 3) for member in range(n)]
    rows, columns = sum(sizes), 2 * n
    parts = [(sizes[member], columns) for member in range(n)]
    result = [
        Case("AllReduce", group | {"reduce": how}, bucket, [2 * ring] * n, how)
        for how in ("sum", "max", "min", *(() if dtype == "int32" else ("mean",)))
    ]
    result += [
        Case("Reduce", group | {"root": n - 1}, bucket, [ring] * n),
        Case(
            "Broadcast", group | {"root": n // 2, "dtype": dtype, "shapes": texts},
            [bucket[0] if member == n // 2 else [] for member in range(n)], [ring] * n,
        ),
        Case("ReduceScatter", group | {"cuts": cuts}, bucket, [ELEMENTS - own for own in lengths], "cuts"),
        Case(
            "ReduceScatter", group | {"axis": 0, "sizes": sizes}, arrays([(rows, 4)], n, dtype),
            [4 * (rows - own) for own in sizes], "axis",
        ),
        Case(
            "AllGather", group | {"cuts": cuts, "shapes": texts},
            [arrays([(own,)], 1, dtype)[0] for own in lengths], [ELEMENTS - own for own in lengths], "cuts",
        ),
        Case(
            "AllGather", group | {"axis": 1, "sizes": sizes},
            [arrays([(2, own, 3)], 1, dtype)[0] for own in sizes], [6 * (rows - own) for own in sizes], "axis",
        ),
        Case(
            "AllToAll",
            group | {"split_axis": 1, "concat_axis": 0, "split_sizes": [2] * n, "concat_sizes": sizes},
            [arrays([part], 1, dtype)[0] for part in parts], [own * (columns - 2) for own in sizes],
        ),
    ]  # fmt: skip
    if n == 2:
        result += [
            Case("Send", group | {"peer": 1, "tag": 3}, [bucket[0], []], [ELEMENTS, 0]),
            Case("Recv", group | {"peer": 0, "tag": 3, "dtype": dtype, "shapes": texts}, [bucket[0], []], [0, 0]),
        ]
    return result


EVERY = [
    pytest.param(n, dtype, case, id=f"{case.op}{case.label}-{n}-{dtype}")
    for n in SIZES
    for dtype in NUMPY
    for case in cases(n, dtype)
]


def own_end(case: Case, member: int) -> bool:
    """Whether a node of this operator stands on this member: Send and Recv have one end each."""
    return case.op not in ("Send", "Recv") or (case.op == "Send") == (member == 0)


def test_every_record_has_a_case() -> None:
    assert {case.op for case in cases(2)} == set(COLLECTIVES)


@pytest.mark.parametrize("n, dtype, case", EVERY)
def test_executed_types_are_the_shape_rule(n: int, dtype: str, case: Case) -> None:
    record = COLLECTIVES[case.op]
    results = record.execute(case.attributes, case.given, dtype)
    assert len(results) == n
    for member, result in enumerate(results):
        if result is None:
            assert case.op == "Reduce" and member != case.attributes["root"]
        elif own_end(case, member):
            inputs = [] if case.op == "Recv" else case.types(dtype, member)
            expected = record.outputs(case.attributes, inputs, n, member)
            assert [(array.dtype, array.shape) for array in result] == [(NUMPY[d], shape) for d, shape in expected]


@pytest.mark.parametrize("n, dtype, case", EVERY)
def test_outputs_are_each_members_own(n: int, dtype: str, case: Case) -> None:
    before = [[array.copy() for array in given] for given in case.given]
    results = COLLECTIVES[case.op].execute(case.attributes, case.given, dtype)
    held = [array for result in results for array in result or ()]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(held) for b in held[:i])
    for array in held:
        array[...] = 77  # scalars are arrays too, and writable
    for now, then in zip(case.given, before, strict=True):
        for left, right in zip(now, then, strict=True):
            assert_array_equal(left, right)


@pytest.mark.parametrize("n, dtype, case", EVERY)
def test_cost_is_the_formula(n: int, dtype: str, case: Case) -> None:
    record, item = COLLECTIVES[case.op], NUMPY[dtype].itemsize
    for member in range(n):
        if own_end(case, member):
            sent = record.bytes_sent(case.attributes, case.types(dtype, member), n, member)
            assert sent == int(case.sent[member] * item + 0.5)
            assert n > 1 or sent == 0


@pytest.mark.parametrize("n, dtype, case", EVERY)
def test_all_members_sign_alike(n: int, dtype: str, case: Case) -> None:
    ends = [member for member in range(n) if own_end(case, member)]
    signatures = {call_signature(case.op, case.attributes, case.types(dtype, member)) for member in ends}
    assert len(signatures) == 1
    signature = signatures.pop()
    assert signature.op == case.op and signature.group == "shard" and signature.dtype == dtype
    assert "\n" not in str(signature)


def test_nothing_is_sent_in_a_group_of_one() -> None:
    send = cases(2)[-2]
    assert COLLECTIVES["Send"].bytes_sent(send.attributes, send.types("float32", 0), 1, 0) == 0


def test_send_and_recv_differ_in_the_operator_alone() -> None:
    send, recv = cases(2)[-2:]
    left = call_signature("Send", send.attributes, send.types("float32", 0))
    right = call_signature("Recv", recv.attributes, [])
    assert left != right and left[1:] == right[1:]


SHAPE = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[str, list[list[np.ndarray]], list[int], list[str]]:
    dtype, n = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"])), draw(st.sampled_from(SIZES))
    shapes = draw(st.lists(SHAPE, min_size=1, max_size=4))
    total = sum(int(np.prod(shape)) for shape in shapes)
    inner = sorted(draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    given = [[np.asarray(random.standard_normal(s)).astype(NUMPY[dtype]) for s in shapes] for _ in range(n)]
    return dtype, given, [0, *inner, total], [format_shape(shape) for shape in shapes]


@settings(max_examples=100, deadline=None)
@given(buckets(), st.sampled_from(["sum", "mean", "max", "min"]))
def test_gathering_what_was_reduced_and_scattered_is_an_all_reduce(bucket: Any, how: str) -> None:
    dtype, members, cuts, shapes = bucket
    reduce = {"group": "shard", "reduce": how}
    shards = COLLECTIVES["ReduceScatter"].execute(reduce | {"cuts": cuts}, members, dtype)
    gather = {"group": "shard", "cuts": cuts, "shapes": shapes}
    left = COLLECTIVES["AllGather"].execute(gather, [shard or [] for shard in shards], dtype)
    right = COLLECTIVES["AllReduce"].execute(reduce, members, dtype)
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours or (), theirs or (), strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("n", SIZES)
def test_the_same_along_an_axis(n: int) -> None:
    sizes = [member % 3 for member in range(n)]
    given = arrays([(2, sum(sizes), 3)], n, "float32")
    layout = {"group": "shard", "axis": 1, "sizes": sizes}
    shards = COLLECTIVES["ReduceScatter"].execute(layout, given, "float32")
    left = COLLECTIVES["AllGather"].execute(layout, [shard or [] for shard in shards], "float32")
    assert all(array.flags.c_contiguous and array.base is None for shard in shards for array in shard or ())
    right = COLLECTIVES["AllReduce"].execute({"group": "shard"}, given, "float32")
    assert_array_equal(left, right)


@pytest.mark.parametrize("n", SIZES)
def test_all_to_all_is_undone_by_its_mirror(n: int) -> None:
    rows, columns = [member % 3 for member in range(n)], [1 + member % 2 for member in range(n)]
    given = [arrays([(own, sum(columns))], 1, "float32")[0] for own in rows]
    there = {"group": "tp", "split_axis": 1, "split_sizes": columns, "concat_axis": 0, "concat_sizes": rows}
    back = {"group": "tp", "split_axis": 0, "split_sizes": rows, "concat_axis": 1, "concat_sizes": columns}
    record = COLLECTIVES["AllToAll"]
    moved = record.execute(there, given, "float32")
    whole = np.concatenate([arrays_[0] for arrays_ in given])
    starts = np.cumsum([0, *columns])
    for member, result in enumerate(moved):
        assert_array_equal((result or [])[0], whole[:, starts[member] : starts[member + 1]])
    for result, original in zip(record.execute(back, [m or [] for m in moved], "float32"), given, strict=True):
        assert_array_equal((result or [])[0], original[0])
