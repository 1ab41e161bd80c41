"""A node as rules see it: types, constants that the graph holds, the operator set."""

from __future__ import annotations

from pathlib import Path

from small_graphs import parsed

from gopt.ir.constant_folding import Constants
from gopt.ir.operator_use import use_of


def test_an_operator_knows_its_set_and_what_is_absent(tmp_path: Path):
    graph = parsed("agraph (double[3,5] x) => (double[3,5] y) <double c = {0.5}> { y = Clip(x, , c) }", tmp_path)
    found = use_of(graph.nodes[0], graph, Constants(graph))
    assert found.opset == 20
    assert [found.has(place) for place in range(4)] == [True, False, True, False]
    assert [found.rank(place) for place in range(4)] == [2, 0, 0, 0]
    assert [found.constant(place) for place in (0, 1, 3)] == [None] * 3
    assert found.constant(2) == 0.5
