"""Of the strategies that the links of a node give, the one that costs least."""

from __future__ import annotations

import numpy as np
from members import graph_of

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.records.placements import REPLICATED, Partial, Placement, Shard
from gopt.tensor_parallel.cost import Cost
from gopt.tensor_parallel.other_axes import OtherAxes
from gopt.tensor_parallel.strategy import StrategyChooser
from gopt.tensor_parallel.tokens import Tokens
from gopt.tensor_parallel.window_nodes import Windows

VALUES = {
    "x": np.zeros((4, 8, 16), np.float32), "w": np.zeros((16, 64), np.float32), "y": np.zeros((4, 8, 64), np.float32),
    "z": np.zeros((4, 8, 16), np.float32), "i": np.zeros((2, 1), np.int64), "u": np.zeros((2, 64), np.float32),
    "t": np.zeros((16, 64), np.float32), "last": np.zeros((4, 1, 16), np.float32),
    "flat": np.zeros((4, 16), np.float32),
}  # fmt: skip
MULTIPLY = Node("MatMul", ["x", "w"], ["y"])


def chooser(nodes: list[Node], members: int = 2, **more) -> StrategyChooser:
    graph: Graph = graph_of(nodes, VALUES, 20)
    for name in ("from", "to", "along"):
        if name in more.get("constants", {}):
            value = more["constants"][name]
            graph.initializers[name] = Tensor(graph_of([], {name: value}, 20).types[name], array=value)
            graph.types[name] = graph.initializers[name].type
    constants = Constants(graph)
    return StrategyChooser(
        graph, constants, Cost(members), more.get("tokens"), OtherAxes(graph), Windows(graph, constants),
        more.get("weights", set()), more.get("wanted", {}),
    )  # fmt: skip


def test_a_product_is_split_by_what_is_sharded_already():
    columns, rows = Shard(1, (32, 32)), Shard(0, (8, 8))
    assert chooser([MULTIPLY]).cheapest(MULTIPLY, [REPLICATED, columns]).results == (Shard(2, (32, 32)),)
    found = chooser([MULTIPLY]).cheapest(MULTIPLY, [REPLICATED, rows])
    assert found.operands == (Shard(2, (8, 8)), rows) and found.results == (Partial("sum"),)


def test_weights_are_not_gathered():
    """Though they are smaller than what is sent in their place."""
    known: list[Placement] = [Shard(1, (4, 4)), Shard(0, (8, 8))]
    assert chooser([MULTIPLY]).cheapest(MULTIPLY, known).operands[1] == REPLICATED
    assert chooser([MULTIPLY], weights={"w"}).cheapest(MULTIPLY, known).operands[1] == Shard(0, (8, 8))


def test_a_result_aims_at_the_placement_that_it_must_have():
    """The gradient of a table by rows: each member scatters what falls into its own."""
    scatter = Node("ScatterND", ["t", "i", "u"], ["w"], attributes={"reduction": "add"})
    whole = [REPLICATED] * 3
    rows = Shard(0, (8, 8))
    assert not chooser([scatter]).aimed(scatter)
    found = chooser([scatter], wanted={"w": rows})
    assert found.aimed(scatter)
    assert found.cheapest(scatter, whole).results == (rows,) and found.cheapest(scatter, whole).masked


def test_terms_are_scattered_over_tokens_where_that_costs_less():
    node = Node("Relu", ["x"], ["z"])
    known = [Partial("sum")]
    assert chooser([node]).cheapest(node, known).operands == (REPLICATED,)
    assert chooser([node], tokens=Tokens(4, 8, (4, 4))).cheapest(node, known).operands == (Shard(1, (4, 4)),)


def test_what_one_member_has_is_not_reshaped():
    """The last token: nobody could tell, behind a reshape, which dimension of one was shared out."""
    ends = {name: np.array([value], np.int64) for name, value in (("from", 7), ("to", 8), ("along", 1))}
    cut = Node("Slice", ["x", "from", "to", "along"], ["last"])
    known: list[Placement] = [Shard(1, (4, 4)), *[REPLICATED] * 3]
    last = Shard(1, (0, 1))
    assert chooser([cut], constants=ends).cheapest(cut, known).results == (last,)
    shape = {"to": np.array([4, 16], np.int64)}
    flat = Node("Reshape", ["last", "to"], ["flat"])
    assert chooser([flat], constants=shape).cheapest(flat, [last, REPLICATED]).results == (REPLICATED,)
