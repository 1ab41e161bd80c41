"""Which values hold the same ids: what exporters write around them, and what only looks like it."""

from __future__ import annotations

import numpy as np
import pytest
from small_graphs import parsed

from gopt.analysis.row_values import RowValues

HEAD = """g (int64[4] ids, int64[4] others, int64[2,2] square, float[4] x)
=> (int64[4] out)
<int64 zero = {0}, int64 rows = {9}, int64 last = {8}, int64 least = {-9}, int64 seventh = {-8}, int64 seven = {7},
 int64[1] axis = {-1}, int64[2] pair = {2, 2}, int64[1] flat = {-1}, int64[2] wide = {4, 3}>
{ out = Identity(ids) }"""

SAME = {
    "itself": "v = Identity(ids)",
    "clipped to the table": "v = Clip(ids, least, last)",
    "without a lower bound": "v = Clip(ids, , last)",
    "at most the last": "v = Min(last, ids)",
    "at least the first": "v = Max(ids, least)",
    "wrapped": "n = Less(ids, zero) a = Add(rows, ids) v = Where(n, a, ids)",
    "wrapped the other way": "n = GreaterOrEqual(ids, zero) a = Add(ids, rows) v = Where(n, ids, a)",
    "remainder": "v = Mod(ids, rows)",
    "narrower": "v = Cast <to = 6> (ids)",
    "a column": "v = Unsqueeze(ids, axis)",
    "reshaped twice": "a = Reshape(ids, pair) v = Reshape(a, flat)",
    "clipped, in a column": "a = Clip(ids, least, last) v = Unsqueeze(a, axis)",
}
INSIDE = {
    "transposed": "a = Reshape(ids, pair) v = Transpose(a)",
    "repeated": "a = Unsqueeze(ids, axis) v = Expand(a, wide)",
    "joined with itself": "a = Clip(ids, least, last) v = Concat <axis = 0> (a, ids)",
}
OTHER = {
    "others": "v = Identity(others)",
    "clipped below the table's end": "v = Clip(ids, least, seven)",
    "clipped at zero": "v = Clip(ids, zero, last)",
    "clipped above the table's first row": "v = Clip(ids, seventh, last)",
    "another remainder": "v = Mod(ids, seven)",
    "wrapped by another number": "n = Less(ids, zero) a = Add(seven, ids) v = Where(n, a, ids)",
    "wrapped where others are negative": "n = Less(others, zero) a = Add(rows, ids) v = Where(n, a, ids)",
    "moved": "v = Add(ids, zero)",
    "joined with others": "v = Concat <axis = 0> (ids, others)",
    "through a float": "f = Cast <to = 1> (ids) v = Cast <to = 7> (f)",
    "wrapped below another number": "n = Less(ids, seven) a = Add(rows, ids) v = Where(n, a, ids)",
    "from a float": "v = Cast <to = 7> (x)",
}


def values(body: str, folder) -> RowValues:
    return RowValues(parsed(HEAD.replace("{ out", "{ " + body + " out"), folder))


def within(body: str, folder) -> bool:
    found = values(body, folder)
    return found.within("v", 9, found.sources("ids"))


@pytest.mark.parametrize("name", SAME)
def test_the_same_ids_in_their_order(name, tmp_path):
    found = values(SAME[name], tmp_path)
    known = found.sources("ids")
    assert found.within("v", 9, known) and found.in_order("v", 9, known) == "ids"


@pytest.mark.parametrize("name", INSIDE)
def test_the_same_ids_in_another_order_or_number(name, tmp_path):
    found = values(INSIDE[name], tmp_path)
    known = found.sources("ids")
    assert found.within("v", 9, known) and found.in_order("v", 9, known) == "v"


@pytest.mark.parametrize("name", OTHER)
def test_other_ids(name, tmp_path):
    assert not within(OTHER[name], tmp_path)


@pytest.mark.parametrize("body", ["k = Mod(ids, seven)", "k = Clip(ids, least, last)", "k = Mod(ids, rows)"])
def test_ids_that_are_bounded_before_the_lookup_are_not_looked_through(body, tmp_path):
    """A hash: the ids in front of it may lie outside the table."""
    found = values(f"{body} v = Unsqueeze(k, axis)", tmp_path)
    known = found.sources("k")
    assert found.in_order("v", 9, known) == "k" and found.within("v", 9, known)
    assert not found.within("ids", 9, known)


def test_parts_of_joined_ids(tmp_path):
    found = values("k = Concat <axis = 0> (ids, others) v = Clip(others, least, last)", tmp_path)
    known = found.sources("k")
    assert len(known) == 2 and found.within("v", 9, known) and found.within("k", 9, known)
    assert not found.within("square", 9, known)


def test_joined_ids_that_are_clipped(tmp_path):
    found = values("k = Concat <axis = 0> (ids, others) v = Clip(k, least, last) w = Clip(k, zero, last)", tmp_path)
    known = found.sources("k")
    assert found.within("v", 9, known) and found.in_order("v", 9, known) == "v"
    assert not found.within("w", 9, known)


def test_ids_cut_out_twice_are_the_same(tmp_path):
    body = (
        "a = Gather <axis = 0> (square, zero) b = Gather <axis = 0> (square, zero) c = Gather <axis = 1> (square, zero)"
    )
    found = values(f"{body} v = Identity(a)", tmp_path)
    assert found.within("b", 9, found.sources("a")) and not found.within("c", 9, found.sources("a"))


def test_random_ids_are_the_same_as_themselves_alone(tmp_path):
    draws = "p = RandomUniformLike(x) q = RandomUniformLike(x) v = Cast <to = 7> (p) w = Cast <to = 7> (q)"
    found = values(draws, tmp_path)
    assert found.within("v", 9, found.sources("v")) and not found.within("w", 9, found.sources("v"))


def test_zeros_and_constants(tmp_path):
    body = """z = ConstantOfShape(pair) c = Constant <value_floats = [0.0, 0.0]> () d = Cast <to = 1> (zero)
    e = Expand(d, pair) v = Identity(ids)"""
    found = values(body, tmp_path)
    assert all(map(found.zero, ["z", "c", "d", "e", "zero"])) and not any(map(found.zero, ["rows", "x", "v"]))
    assert found.number("rows") == 9 and found.number("pair") is None and found.number("x") is None
    assert np.array_equal(found.constant("pair"), [2, 2]) and found.constant("ids") is None


TURNED = "t = Transpose(square) u = Transpose(t)"


@pytest.mark.parametrize(
    ("body", "first", "undoes"),
    [
        (TURNED, "t", ["u"]),
        (f"{TURNED} w = Transpose(t)", "t", ["u", "w"]),
        (f"{TURNED} w = Neg(t)", "t", []),
        ("t = Reshape(ids, pair) u = Reshape(t, flat)", "t", ["u"]),
        ("t = Shape(ids) u = Reshape(ids, t)", "t", []),
        ("t = Transpose(square) out2 = Transpose(t)", "out2", []),
    ],
)
def test_a_pair_of_layout_operators_undoes_itself(body, first, undoes, tmp_path):
    found = values(body, tmp_path)
    readers = found.undone(found.graph.producers()[first])
    assert [reader.outputs[0] for reader in readers] == undoes


def test_a_value_that_is_shown_is_not_undone(tmp_path):
    found = values(TURNED, tmp_path)
    found.graph.outputs["t"] = found.graph.types["t"]
    assert found.undone(found.graph.producers()["t"]) == []
