"""Which ids a mask makes zero: said of exactly those whose rows are zero for every batch, held against numbers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import run_graph
from small_graphs import parsed

from gopt.analysis.row_masks import masked_ids
from gopt.analysis.row_values import RowValues

HEAD = """g (int64[6] ids, int64[6] others, float[6,2] d, float[2,3,2] cube) => (float[6,2] rows)
<int64 zero = {0}, int64 three = {3}, int64 minus = {-1}, int64 nine = {9}, int64 last = {8}, int64 least = {-9},
 int64[1] axis = {-1}, int64[2] pair = {2, 3}, int64[2] turned = {3, 2}, int64[1] flat = {-1}, float none = {0.0},
 float one = {1.0}, int64[2] shape = {6, 2}, int64[2] wide = {6, 2}>
{ """
CASES = {
    "one id": ("e = Equal(ids, three) c = Unsqueeze(e, axis) rows = Where(c, none, d)", (3,)),
    "the number first": ("e = Equal(three, ids) c = Unsqueeze(e, axis) rows = Where(c, none, d)", (3,)),
    "all but": ("e = Equal(ids, three) n = Not(e) c = Unsqueeze(n, axis) rows = Where(c, d, none)", (3,)),
    "as torch writes it": (
        """l = GreaterOrEqual(ids, zero) h = Less(ids, nine) a = And(l, h) e = Equal(ids, three) n = Not(e)
        k = And(a, n) c = Unsqueeze(k, axis) u = Not(c) rows = Where(u, none, d)""",
        (3,),
    ),
    "two ids": (
        "e = Equal(ids, three) f = Equal(ids, zero) o = Or(e, f) c = Unsqueeze(o, axis) rows = Where(c, none, d)",
        (0, 3),
    ),
    "two masks": (
        """e = Equal(ids, three) c = Unsqueeze(e, axis) m = Where(c, none, d)
        f = Equal(ids, zero) n = Not(f) g = Unsqueeze(n, axis) p = Cast <to = 1> (g) rows = Mul(m, p)""",
        (0, 3),
    ),
    "a negative id": ("e = Equal(ids, minus) c = Unsqueeze(e, axis) rows = Where(c, none, d)", (-1,)),
    "of clipped ids": (
        "k = Clip(ids, least, last) e = Equal(k, three) c = Unsqueeze(e, axis) rows = Where(c, none, d)", (3,),
    ),
    "whole rows": ("e = Equal(ids, three) c = Unsqueeze(e, axis) w = Expand(c, wide) rows = Where(w, none, d)", ()),
    "in another shape": (
        """i = Reshape(ids, pair) e = Equal(i, three) c = Unsqueeze(e, axis) w = Where(c, none, cube)
        rows = Reshape(w, shape)""",
        (3,),
    ),
    "an order of its own": (
        """i = Reshape(ids, turned) t = Transpose(i) e = Equal(t, three) c = Unsqueeze(e, axis) w = Where(c, none, cube)
        rows = Reshape(w, shape)""",
        (),
    ),
    "where it is negative after a wrap": (
        """l = Less(ids, zero) a = Add(ids, nine) k = Where(l, a, ids) e = Equal(k, minus) c = Unsqueeze(e, axis)
        rows = Where(c, none, d)""",
        (),
    ),
    "only where others say so": (
        """e = Equal(ids, three) f = Equal(others, zero) o = And(e, f) c = Unsqueeze(o, axis)
        rows = Where(c, none, d)""",
        (),
    ),
    "others": ("e = Equal(others, three) c = Unsqueeze(e, axis) rows = Where(c, none, d)", ()),
    "ones": ("e = Equal(ids, three) c = Unsqueeze(e, axis) rows = Where(c, one, d)", ()),
    "nothing": ("rows = Identity(d)", ()),
}  # fmt: skip


def test_rows_that_are_repeated_are_no_longer_one_for_each_id(tmp_path):
    """The inner mask is over columns: ids have as many as rows have."""
    text = """g (int64[2] ids, float[1,2] d) => (float[2,2] rows)
    <int64 zero = {0}, int64 three = {3}, int64[1] axis = {-1}, int64[1] front = {0}, float none = {0.0}>
    { e = Equal(ids, zero) f = Unsqueeze(e, front) k = Where(f, none, d)
      o = Equal(ids, three) c = Unsqueeze(o, axis) n = Not(c) rows = Where(n, k, none) }"""
    values = RowValues(parsed(text, tmp_path))
    assert masked_ids(values, "ids", "rows", 9, values.sources("ids")) == (3,)
    columns = text.replace("rows = Where(n, k, none)", "rows = Expand(k, axis2)").replace(
        "float none", "int64[2] axis2 = {2, 2}, float none"
    )
    values = RowValues(parsed(columns, tmp_path))
    assert masked_ids(values, "ids", "rows", 9, values.sources("ids")) == ()


@pytest.mark.parametrize("name", CASES)
def test_masked_ids(name, tmp_path):
    body, wanted = CASES[name]
    graph = parsed(f"{HEAD}{body} }}", tmp_path)
    values = RowValues(graph)
    found = masked_ids(values, "ids", "rows", 9, values.sources("ids"))
    assert found == wanted
    generator = np.random.default_rng(2)
    for _ in range(20):
        feeds = {"ids": generator.integers(-9, 9, 6), "others": generator.integers(-9, 9, 6)}
        feeds |= {"d": np.ones((6, 2), np.float32), "cube": np.ones((2, 3, 2), np.float32)}
        rows = run_graph(graph, {each: feeds[each] for each in graph.inputs if each not in graph.initializers})["rows"]
        assert all(not rows[feeds["ids"] == id].any() for id in found)
