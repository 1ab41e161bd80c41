"""Gradients as sums of rows: spellings that exporters use, held against numbers, and what is none."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import run_graph
from small_graphs import parsed

from gopt.analysis.row_sums import NoRowSum, RowSums, SparseGradient
from gopt.analysis.row_values import RowValues
from gopt.analysis.training import Phase
from gopt.ir.graph import Graph

HEAD = """g (int64[4] ids, int64[3] more, int64[2,2] square, float[4,2] d, float[3,2] e, float[2,2,2] cube,
int64[4] least, float[2,2] t2, float scale, float[5,2] dense, float[5,1] fed) => (float[5,2] out)
<int64[2] shape = {5, 2}, int64[1] five = {5}, int64[1] axis = {-1}, int64[2] wide = {4, 2}, int64 depth = {5},
 float[2] pair = {0.0, 1.0}, float[2] bad = {1.0, 0.0}, int64 four = {4}, float none = {0.0}, int64[2] rows = {-1, 5},
 int64[2] high = {4, 2}, float[5,1] column = {1.0, 0.0, 2.0, 1.0, 1.0}, bool yes = {1}, int64[1] all = {-1},
 int64[2] turned = {2, 5}, int64[2] tall = {5, 1}, float half = {0.5}, float[1,2] across = {1.0, 2.0},
 float[5,2] grid = {1.0, 0.0, 2.0, 1.0, 1.0, 3.0, 1.0, 2.0, 1.0, 4.0}>
{ """
Z = "z = ConstantOfShape(shape) i = Unsqueeze(ids, axis) "
SUM = Z + 's = ScatterND <reduction = "add"> (z, i, d) '
OTHER = 'j = Unsqueeze(more, axis) y = ConstantOfShape(shape) u = ScatterND <reduction = "add"> (y, j, e) '
SUMS: dict[str, tuple[str, int]] = {
    "n-d": (SUM + "g = Identity(s)", 1),
    "elements": (Z + 'j = Expand(i, wide) g = ScatterElements <axis = 0, reduction = "add"> (z, j, d)', 1),
    "ids in two dimensions": (
        Z + 'j = Unsqueeze(square, axis) g = ScatterND <reduction = "add"> (z, j, cube)', 1
    ),
    "one-hot": ("h = OneHot(ids, depth, pair) t = Transpose(h) g = MatMul(t, d)", 1),
    "one-hot along the first axis": ("h = OneHot <axis = 0> (ids, depth, pair) g = MatMul(h, d)", 1),
    "one-hot by a Gemm": ("h = OneHot(ids, depth, pair) g = Gemm <transA = 1> (h, d)", 1),
    "one-hot of ids in two dimensions": (
        "h = OneHot(square, depth, pair) k = Reshape(h, rows) t = Transpose(k) c = Reshape(cube, high) g = MatMul(t,c)",
        1,
    ),
    "two added": (SUM + OTHER + "g = Add(s, u)", 2),
    "three summed": (SUM + OTHER + "k = Expand(none, shape) g = Sum(u, s, k)", 2),
    "one onto the other": (SUM + 'j = Unsqueeze(more, axis) g = ScatterND <reduction = "add"> (s, j, e)', 2),
    "scaled": (SUM + "g = Mul(s, scale)", 1),
    "divided": (SUM + "k = Div(s, scale) g = Neg(k)", 1),
    "cast": (SUM + "k = Cast <to = 11> (s) g = Cast <to = 1> (k)", 1),
    "masked by rows": (SUM + "g = Mul(column, s)", 1),
    "gated": (SUM + "g = Where(yes, s, none)", 1),
    "scaled and added": (SUM + OTHER + "k = Mul(scale, s) g = Add(k, u)", 2),
}  # fmt: skip
NONE: dict[str, tuple[str, str]] = {
    "not added": (Z + "g = ScatterND(z, i, d)", "writes rows over each other"),
    "the largest kept": (Z + 'g = ScatterND <reduction = "max"> (z, i, d)', "writes rows over each other"),
    "onto something": (Z + 'g = ScatterND <reduction = "add"> (dense, i, d)', "not a sum of rows"),
    "along columns": (
        Z + 'j = Expand(i, wide) g = ScatterElements <axis = 1, reduction = "add"> (dense, j, d)', "adds elements"
    ),
    "with something dense": (SUM + "g = Add(s, dense)", "not a sum of rows"),
    "a difference": (SUM + "g = Sub(s, dense)", "makes a part of it"),
    "squared": (SUM + "g = Mul(s, s)", "mixes it with something else"),
    "times something": (SUM + "g = Mul(s, dense)", "mixes it with something else"),
    "times a constant for each element": (SUM + "g = Mul(s, grid)", "mixes it with something else"),
    "times a constant for each column": (SUM + "g = Mul(s, across)", "mixes it with something else"),
    "times a row's number that is fed": (SUM + "g = Mul(s, fed)", "mixes it with something else"),
    "divided by it": (SUM + "g = Div(scale, s)", "mixes it with something else"),
    "gated by something": (SUM + "g = Where(yes, s, dense)", "mixes it with something else"),
    "gated to one": (SUM + "g = Where(yes, s, half)", "mixes it with something else"),
    "read twice": (SUM + "k = Neg(s) g = Add(s, k)", "has 2 readers"),
    "one-hot with other numbers": ("h = OneHot(ids, depth, bad) t = Transpose(h) g = MatMul(t, d)", "not a sum"),
    "not one-hot": ("t = Transpose(d) k = MatMul(d, t) m = MatMul(k, d) g = MatMul(dense, t2)", "not a sum of rows"),
    "an exponential": (SUM + "g = Exp(s)", "makes a part of it"),
    "other ids": ('z = ConstantOfShape(shape) i = Unsqueeze(least, axis) g = ScatterND <reduction = "add"> (z, i, d)',
                  "adds to other rows"),
}  # fmt: skip


def graph_of(body: str, folder) -> Graph:
    graph = parsed(f"{HEAD}{body} out = Abs(g) }}", folder)
    for node in graph.nodes:
        node.phase = Phase.UPDATE if node.is_a("Abs") else Phase.BACKWARD
    return graph


def terms(graph: Graph, gradient: str = "g") -> list[SparseGradient]:
    values = RowValues(graph)
    known = frozenset[int]().union(*(values.sources(name) for name in ("ids", "more", "square")))
    sums = RowSums(values, 5, known)
    sums.read(gradient)
    return sums.terms


def rebuilt(graph: Graph, found: list[SparseGradient], given: dict[str, np.ndarray]) -> np.ndarray:
    """The gradient from the terms alone: their rows, and the nodes that scale them."""
    total = np.zeros((5, 2), np.float32)
    for term in found:
        rows = given[term.rows].reshape(-1, 2)
        dense = np.zeros((5, 2), np.float32)
        np.add.at(dense, given[term.ids].reshape(-1), rows)
        scaled = Graph("scaling", list(term.scaling), {}, {}, graph.initializers, graph.types, graph.header)
        if term.scaling:
            read = {name for node in term.scaling for name in node.inputs if name in given}
            last = term.scaling[-1].outputs[0]
            scaled.inputs = {name: graph.types[name] for name in (*read, term.dense)}
            scaled.outputs = {last: graph.types[last]}
            dense = run_graph(scaled, {**{name: given[name] for name in read}, term.dense: dense})[last]
        total += dense
    return total


@pytest.mark.parametrize("name", SUMS)
def test_the_terms_are_the_gradient(name, tmp_path):
    body, count = SUMS[name]
    graph = graph_of(body, tmp_path)
    found = terms(graph)
    assert len(found) == count and [term.onto for term in found] == [False, name == "one onto the other"][:count]
    generator = np.random.default_rng(4)
    given = {}
    for each, type in graph.inputs.items():
        if each not in graph.initializers:
            whole = type.dtype == "int64"
            given[each] = generator.integers(-5, 5, type.dims) if whole else generator.random(type.dims, np.float32)
    shown = {name for term in found for name in (term.ids, term.rows)} - given.keys()
    graph.outputs.update({each: graph.types[each] for each in ("g", *shown)})
    made = run_graph(graph, given)
    assert np.allclose(rebuilt(graph, found, {**given, **made}), made["g"], rtol=1e-6)


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_sum_of_rows(name, tmp_path):
    body, why = NONE[name]
    with pytest.raises(NoRowSum, match=why):
        terms(graph_of(body, tmp_path))


def test_a_sum_that_the_backward_reads_again_is_dense(tmp_path):
    graph = graph_of(SUM + "g = Neg(s) k = Exp(g)", tmp_path)
    with pytest.raises(NoRowSum, match="of the backward reads its gradient"):
        terms(graph)


def test_a_sum_that_is_shown_is_dense(tmp_path):
    graph = graph_of(SUM + "g = Neg(s)", tmp_path)
    graph.outputs["s"] = graph.types["s"]
    with pytest.raises(NoRowSum, match="output s contains all of its gradient"):
        terms(graph)
