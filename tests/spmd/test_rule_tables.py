"""What the rules take, by tables of which each row is written once more: nothing less, and nothing beside it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from test_rules import ALONE, EVEN, FLAT, OTHER, ROWS, SOLE

from gopt.records.placements import FLAG_COUNT, PER_MEMBER, REPLICATED, FlatShard, Partial, Placement
from gopt.spmd.rules import FULL_REDUCTIONS, RULES, Mismatch, Operand, Use, result

MOVES = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Transpose", "Tile")
TRIED = sorted({*RULES, *MOVES, *FULL_REDUCTIONS, "Concat", "Softmax", "MatMul", "Gemm", "Where", "Slice"})
PASSED = {
    **dict.fromkeys(("sum", "mean"), ("Neg Cast CastLike", "Add Sub Sum Concat", "Mul Div", "Mul")),
    "max": ("Cast CastLike", "Max", "Max", "Max"), "min": ("Cast CastLike", "Min", "Min", "Min"),
    "count": ("Cast CastLike", "Add Sum", "", ""), "any": ("Cast CastLike Not", "Or", "Or", "Or"),
    "all": ("Not", "And", "And", "And"),
}  # fmt: skip
"""Terms -> the operators that they pass through beside moves: alone, two of them, before a value that is equal on all
members, behind one."""
ALWAYS = {"Add", "Sub", "Sum", "Mul", "Div", "Max", "Min", "Or", "And", "Concat"}
"""Operators of two operands, which are not tried with one."""


@pytest.mark.parametrize("on", [None, FLAT], ids=str)
@pytest.mark.parametrize("op", PASSED)
def test_the_operators_that_terms_pass_through_and_no_others(op, on):
    dtype = "bool" if op in ("any", "all") else "float32"
    term, same = Operand("x", Partial(op, on), True, dtype), Operand("c", REPLICATED, True, dtype)
    place = REPLICATED if on is None else on

    def made(*operands: Operand) -> dict[str, Placement]:
        found = {}
        for op_type in TRIED:
            if len(operands) > 1 or op_type not in ALWAYS:
                with suppress(Mismatch):
                    found[op_type] = result(Use(op_type, operands, place, True, "float32"))
        return found

    alone, two, before, behind = map(str.split, PASSED[op])
    other = (
        {"Cast": "count", "CastLike": "count", "Not": "all"} if op == "any" else {"Not": "any"} if op == "all" else {}
    )
    assert made(term) == {name: Partial(other.get(name, op), on) for name in (*MOVES, *alone)}
    moved_or_cast = [*MOVES, *(["Cast", "CastLike"] if op != "all" else []), *(["Not"] if op in ("any", "all") else [])]
    assert made(term, term).keys() - {*moved_or_cast, "Neg"} == {*two}
    assert made(term, same).keys() - {*moved_or_cast, "Neg"} == {*before}
    assert made(same, term).keys() - {*moved_or_cast, "Neg", "CastLike"} == {*behind}  # which reads a type
    assert not {*MOVES} & made(same, term).keys() and {*MOVES} <= made(term, same).keys()


def test_what_reductions_of_a_shard_are_terms_of():
    found = {}
    for op_type in (*FULL_REDUCTIONS, "ReduceNothing"):
        with suppress(Mismatch):
            found[op_type] = result(Use(op_type, (Operand("x", EVEN, dtype="float32"),), REPLICATED, True))
    assert found == {
        **dict.fromkeys(("ReduceSum", "ReduceSumSquare", "ReduceL1"), Partial("sum")), "ReduceMean": Partial("mean"),
        "ReduceMax": Partial("max"), "ReduceMin": Partial("min"),
    }  # fmt: skip


def test_a_shard_is_reduced_whole_by_axes_that_all_members_have():
    shard, axes = Operand("x", FLAT), Operand("axes", REPLICATED)
    assert result(Use("ReduceSum", (shard, axes), REPLICATED, True)) == Partial("sum")
    with pytest.raises(Mismatch) as caught:
        result(Use("ReduceSum", (shard,), REPLICATED))
    assert caught.value.expected == "a whole tensor, to reduce it along some of its axes"
    for operands, single, expected in (
        ((shard, axes), False, "a whole tensor, to reduce it along some of its axes"),
        ((shard, Operand("axes", PER_MEMBER)), True, "axes that are equal on all members"),
        ((shard, shard), True, "axes that are equal"),
        ((Operand("x", REPLICATED), shard), True, "axes that are equal"),
        ((shard, Operand("axes", FLAT)), True, "axes"),
    ):  # fmt: skip
        with pytest.raises(Mismatch) as caught:
            result(Use("ReduceSum", operands, REPLICATED, single))
        assert expected in caught.value.expected


def test_parts_of_one_owner_are_not_added_element_by_element():
    """It has all of both, but they are other parts of the bucket."""
    other = FlatShard((0, 3, 3, 10, 12), 4, 10)
    for operands in ((SOLE, other), (other, SOLE)):
        for single in (False, True):
            given = tuple(Operand("x", each, single) for each in operands)
            with pytest.raises(Mismatch) as caught:
                result(Use("Add", given, SOLE))
            assert caught.value.operand.placement == other and "element by element" in caught.value.expected
            assert result(Use("MatMul", given, SOLE)) == ALONE
    assert result(Use("Add", (Operand("x", SOLE), Operand("y", REPLICATED)), SOLE)) == ALONE
    assert result(Use("Add", (Operand("x", SOLE), Operand("y", REPLICATED, True)), SOLE)) == SOLE


def test_who_is_named_and_why():
    """The operand that is wrong, not the first one."""
    fine, terms = Operand("fine", REPLICATED, True), Operand("terms", Partial("sum", FLAT), True)
    for use, name, expected in (
        (Use("Add", (fine, terms), REPLICATED), "terms", "terms on the members that run it"),
        (Use("Add", (fine, Operand("other", OTHER)), FLAT), "other", "on which it runs"),
        (Use("Add", (Operand("x", FLAT), Operand("whole", REPLICATED)), FLAT), "whole", "one element equal"),
        (Use("MatMul", (fine, Operand("rows", ROWS)), ALONE), "rows", "what member 2 has"),
        (Use("MatMul", (fine, Operand("own", PER_MEMBER)), ALONE), "own", "what member 2 has"),
    ):
        with pytest.raises(Mismatch) as caught:
            result(use)
        assert (caught.value.operand.name, expected in caught.value.expected) == (name, True)


@pytest.mark.parametrize("cuts", [(0, 1, 4, 7, 10), (0, 3, 6, 9, 10)])
def test_the_mean_of_shards_of_which_one_is_shorter_is_refused(cuts):
    with pytest.raises(Mismatch, match="shards of one length"):
        result(Use("ReduceMean", (Operand("x", FlatShard.whole(cuts), dtype="float32"),), REPLICATED, True))


@pytest.mark.parametrize(
    ("old", "new", "fine"),
    [("int8", "int8", True), ("int32", "int64", True), ("int64", "int32", True), ("int32", "int8", False)],
)
def test_the_types_in_which_a_count_of_flags_is_kept(old, new, fine):
    use = Use("Cast", (Operand("x", Partial("count"), True, old),), REPLICATED, True, new)
    if fine:
        assert result(use) == Partial("count")
    else:
        with pytest.raises(Mismatch):
            result(use)


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "LessOrEqual", "Max", "Greater", "Reshape"])
def test_no_other_operator_makes_a_flag_of_a_zero_and_a_count(op_type):
    zero, count = Operand("zero", REPLICATED, True, zero=True), Operand("x", FLAG_COUNT, True)
    with pytest.raises(Mismatch, match="the flag itself"):
        result(Use(op_type, (zero, count), REPLICATED, True, "bool"))


def test_whole_numbers_stay_whole_numbers():
    terms = Operand("x", Partial("sum"), True, "int32")
    assert result(Use("Cast", (terms,), REPLICATED, True, "int32")) == Partial("sum")
    with pytest.raises(Mismatch):
        result(Use("Cast", (terms,), REPLICATED, True, "int8"))
