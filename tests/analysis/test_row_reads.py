"""Reads of a table: what looks rows up, and what reads all of it."""

from __future__ import annotations

import pytest
from small_graphs import parsed

from gopt.analysis.row_reads import RowReads, row_reads
from gopt.analysis.row_values import RowValues
from gopt.analysis.training import Phase

HEAD = """g (float[5,2] w, float[5] b, float[5,1] column, float[5,2,3] cube, float[1,5] row, int64[4] ids,
int64[4,1] at, int64[4,2] each) => (float[2] out)
<int64[2] wide = {4, 2}, int64[1] flat = {5}, int64[1] last = {-1}, int64[1] one = {1}, int64[2] other = {2, 5},
 int64[3] part = {4, 2, 1}, int64[1] none = {0}>
{ """
ROWS = {
    "gather": ("r = Gather(w, ids)", "w", "ids"),
    "gather along the first axis from the end": ("r = Gather <axis = -2> (w, ids)", "w", "ids"),
    "of rank 1": ("r = Gather(b, ids)", "b", "ids"),
    "of rank 3": ("r = Gather(cube, at)", "cube", "at"),
    "cast before": ("h = Cast <to = 10> (w) r = Gather(h, ids)", "w", "ids"),
    "flattened before": ("h = Reshape(column, flat) r = Gather(h, ids)", "column", "ids"),
    "squeezed before": ("h = Squeeze(column, one) r = Gather(h, ids)", "column", "ids"),
    "by n-d indices": ("r = GatherND(w, at)", "w", "at"),
    "by indices of single elements": ("i = Expand(at, wide) r = GatherElements <axis = 0> (w, i)", "w", "at"),
    "by indices along the first axis from the end": (
        "i = Expand(at, wide) r = GatherElements <axis = -2> (w, i)",
        "w",
        "at",
    ),
    "elements of rank 1": ("r = GatherElements(b, ids)", "b", "ids"),
    "its shape": ("r = Gather(w, ids) s = Shape(w)", "w", "ids"),
    "turned and turned back": ("t = Transpose(w) u = Transpose(t) r = Gather(u, ids)", "w", "ids"),
}
WHOLE = {
    "another axis": "r = Gather <axis = 1> (w, one)",
    "elements by n-d indices": "r = GatherND(w, each)",
    "elements inside rows": "r = GatherElements <axis = 1> (w, each)",
    "repeated indices along rows": "i = Expand(at, wide) r = GatherElements <axis = 1> (w, i)",
    "repeated indices along the last axis": "i = Expand(at, wide) r = GatherElements <axis = -1> (w, i)",
    "indices that differ inside a row": "r = GatherElements <axis = 0> (w, each)",
    "a part of each row": "k = Unsqueeze(at, last) i = Expand(k, part) r = GatherElements <axis = 0> (cube, i)",
    "one id repeated": "k = Slice(at, none, one) i = Expand(k, wide) r = GatherElements <axis = 0> (w, i)",
    "a product": "r = MatMul(row, w)",
    "a transpose": "r = Transpose(w)",
    "a sum": "r = ReduceSum <keepdims = 0> (w)",
    "rows and a product": "r = Gather(w, ids) k = Mul(w, w)",
    "rows of another shape": "k = Reshape(w, other) r = Gather(k, one)",
    "as indices": "k = Cast <to = 7> (w) r = Gather(b, k)",
    "turned, and read so": "t = Transpose(w) u = Transpose(t) r = Gather(u, ids) k = Neg(t)",
}


def reads(body: str, name: str, folder, after: set[str] | None = None) -> RowReads:
    graph = parsed(f"{HEAD}{body} out = Cast <to = 1> (wide) }}", folder)
    for node in graph.nodes:
        node.phase = Phase.FORWARD
    return row_reads(RowValues(graph), name, after or set())


@pytest.mark.parametrize("name", ROWS)
def test_rows(name, tmp_path):
    body, table, ids = ROWS[name]
    found = reads(body, table, tmp_path)
    assert found.whole == "" and [(each.ids, each.rows, each.prefetchable) for each in found.lookups] == [
        (ids, "r", True)
    ]
    assert len(found.lookups[0].through) == body.count("h = ") + 2 * body.count("u = ")


@pytest.mark.parametrize("name", WHOLE)
def test_whole(name, tmp_path):
    assert reads(WHOLE[name], "cube" if "cube" in WHOLE[name] else "w", tmp_path).whole


def test_a_cast_of_it_that_is_shown(tmp_path):
    graph = parsed(f"{HEAD}h = Cast <to = 10> (w) r = Gather(h, ids) out = Cast <to = 1> (wide) }}", tmp_path)
    graph.outputs["h"] = graph.types["h"]
    assert row_reads(RowValues(graph), "w", set()).whole == "output h contains all of it"


def test_ids_behind_parameters_are_not_known_before_them(tmp_path):
    found = reads("r = Gather(w, ids)", "w", tmp_path, {"ids"})
    assert not found.lookups[0].prefetchable


def test_what_the_update_reads_is_no_read(tmp_path):
    graph = parsed(f"{HEAD}r = Gather(w, ids) k = Mul(w, w) out = Cast <to = 1> (wide) }}", tmp_path)
    for node in graph.nodes:
        node.phase = Phase.UPDATE if node.is_a("Mul") else Phase.BACKWARD
    found = row_reads(RowValues(graph), "w", set())
    assert found.whole == "" and len(found.lookups) == 1
