"""Windows in a step: a network of convolutions whose images are split, and nodes that are not what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fuzz_images import judge
from helpers import source
from images import by_places, largest_error
from members import run, simulated, swept
from plants import change_attributes

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.types import TensorType
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import REPLICATED, Partial, Shard, Window, WindowTerms
from gopt.spmd.halo import Halo
from gopt.spmd.links import Strategy
from gopt.spmd.rules import Mismatch, Operand
from gopt.tensor_parallel.check import check, together
from gopt.tensor_parallel.mappings import beside, is_mapping
from gopt.tensor_parallel.window_nodes import counted_as, placed, pool_member, taken
from gopt.verification.verify import Verifier


@pytest.mark.parametrize(
    "shard",
    [Shard(2, (4, 4)), Shard(3, (3, 2, 3)), Shard(2, (2, 2, 2, 2)), Shard(2, (7, 1)),
     Shard(2, (4, 0, 4))],
    ids=str,
)  # fmt: skip
def test_a_step_is_the_same(shard):
    assert largest_error(by_places("cnn_sgd", shard)) < 1e-4


@pytest.mark.parametrize("seed", range(24))
def test_drawn_networks(seed):
    judge(seed)


@pytest.mark.parametrize(("mesh", "stage"), [("h=2,w=2", 0), ("shard=2,h=2", 3)])
def test_ranks_train_as_the_source_does(mesh, stage, tmp_path):
    """Written, fed with their parts of the images, and run."""
    options = build_pipeline(defaults={"shard": {"stage": stage}})
    gopt.shard(source("cnn_sgd"), Mesh.parse(mesh), pipeline=options).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(confirm=False).equal


def test_halves_too():
    assert largest_error(by_places("cnn_mom_fp16", Shard(2, (5, 3)))) < 2e-2


def test_nothing_is_computed_whole_and_strips_alone_are_exchanged():
    """Two convolutions of 3 rows forward; in the backward their windows are there, and one gradient is a halo sum."""
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    assert not step.made.whole
    assert step.made.conversions["halo exchange"] == 3
    assert step.made.conversions["halo sum"] == 2
    graph = step.made.graph
    rows = [
        graph.types[node.outputs[0]].dims for node in graph.nodes
        if node.op_type == "AllGather" and node.inputs[0].endswith("strips")
    ]  # fmt: skip
    assert rows == [(8, 1, 2, 8), (8, 8, 2, 4), (8, 8, 2, 4)], "a row of each member"


def test_gradients_of_weights_are_summed_over_members():
    """Each member has read its part of the places alone."""
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    summed = {name for node in step.made.graph.nodes if node.op_type == "AllReduce" for name in node.outputs}
    found = {weight for weight, gradient in step.training.gradients.items() if gradient in summed}
    assert {"conv1.weight", "conv2.weight", "conv2.bias", "bn1.bias"} <= found
    assert found.isdisjoint({"fc.bias", "bn2.bias"}), "of values that all have"


# --- nodes that are not what they say ---------------------------------------------------------------------------------


def spoiled(op_type: str, **attributes: object):
    """A step in which the first node of a kind says something else."""
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    node = next(each for each in step.made.graph.nodes if each.op_type == op_type)
    change_attributes(step.made, node, **attributes)
    return step


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("HaloStrips", {"sizes": [5, 3]}), ("HaloJoin", {"ranges": [-1, 6, 3, 9]}),
        ("HaloJoin", {"ranges": [0, 6, 3, 9]}), ("HaloJoin", {"border": "lowest"}), ("HaloJoin", {"sizes": [3, 5]}),
        ("HaloSum", {"ranges": [-1, 3, 1, 4]}), ("HaloSum", {"sizes": [3, 1]}),
        ("MemberMaxPool", {"ranges": [0, 4, 3, 8]}), ("MemberMaxPool", {"length": 9}),
        ("WindowScatter", {"ranges": [0, 3, 4, 8]}), ("WindowScatter", {"length": 7}),
        ("Conv", {"pads": [0, 1, 0, 1]}), ("Conv", {"dilations": [2, 1]}),
    ],
)  # fmt: skip
def test_a_window_that_is_not_read_is_refused(op_type, attributes):
    step = spoiled(op_type, **attributes)
    with pytest.raises(InvariantError):
        check(step.training, step.made.graph, "tp", step.seeds)


def test_a_scatter_makes_the_shape_of_what_was_pooled():
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    graph = step.made.graph
    node = next(each for each in graph.nodes if each.op_type == "WindowScatter")
    graph.types[node.outputs[0]] = TensorType("float32", (8, 8, 8, 7, 1))
    with pytest.raises(InvariantError, match="WindowScatter"):
        check(step.training, graph, "tp", step.seeds)


def test_strips_of_another_value_are_refused():
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    joins = [node for node in step.made.graph.nodes if node.op_type in ("HaloJoin", "HaloSum") and len(node.inputs) > 1]
    joins[-1].inputs[1], joins[-2].inputs[1] = joins[-2].inputs[1], joins[-1].inputs[1]
    with pytest.raises(InvariantError, match="joined"):
        check(step.training, step.made.graph, "tp", step.seeds)


def test_a_window_without_its_strips_is_refused():
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    join = next(node for node in step.made.graph.nodes if node.op_type == "HaloJoin" and len(node.inputs) > 1)
    join.inputs.pop()
    with pytest.raises(InvariantError, match="HaloJoin"):
        check(step.training, step.made.graph, "tp", step.seeds)


def test_terms_of_a_transposed_convolution_are_summed():
    step = by_places("cnn_sgd", Shard(2, (4, 4)))
    total = next(node for node in step.made.graph.nodes if node.op_type == "HaloSum")
    readers = [node for node in step.made.graph.nodes if total.outputs[0] in node.inputs]
    for node in readers:
        node.inputs = [total.inputs[0] if name == total.outputs[0] else name for name in node.inputs]
    step.made.graph.nodes.remove(total)
    with pytest.raises(InvariantError, match="terms of a sum"):
        check(step.training, step.made.graph, "tp", step.seeds)


# --- several axes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op_type", ["HaloStrips", "HaloJoin", "HaloSum"])
def test_windows_along_another_axis_leave_placements_as_they_are(op_type):
    node = halo(op_type, "sum" if op_type == "HaloSum" else "exchange", border="zeros")
    assert is_mapping(node, {"h"})
    assert not is_mapping(node, {"w"})
    for placement in (REPLICATED, Shard(3, (4, 4)), Window(3, ((0, 5), (3, 8)), 8), Partial("sum")):
        assert beside(node, Operand("x", placement)) == placement
    for placement in (Shard(2, (4, 4)), Window(2, ((0, 5), (3, 8)), 8), WindowTerms(2, ((0, 5),), 8), Partial("max")):
        with pytest.raises(Mismatch):
            beside(node, Operand("x", placement))


def test_terms_are_not_put_beside_the_lowest_number():
    with pytest.raises(Mismatch):
        beside(halo("HaloJoin", "exchange", border="lowest"), Operand("x", Partial("sum")))


def test_two_axes_do_not_split_one_dimension_by_windows():
    window = Window(2, ((-1, 5), (3, 9)), 8)
    assert not together(window, Shard(2, (4, 4)))
    assert together(window, Shard(3, (4, 4)))
    assert together(window, replace(window, dim=3))


# --- records ----------------------------------------------------------------------------------------------------------


def halo(op_type: str, kind: str, **more: object) -> Node:
    attributes = {"group": "h", "axis": 2, **Halo((4, 4), ((-1, 5), (3, 9)), kind).attributes, **more}
    return Node(op_type, ["x", "s"], ["y"], domain=SPMD, attributes=attributes)


def test_what_a_halo_takes_and_gives():
    window, terms = Window(2, ((-1, 5), (3, 9)), 8), WindowTerms(2, ((-1, 5), (3, 9)), 8)
    assert taken(halo("HaloJoin", "exchange"))[0] == Shard(2, (4, 4))
    assert taken(halo("HaloSum", "sum"))[0] == terms
    assert placed(halo("HaloJoin", "exchange")) == window
    assert placed(halo("HaloJoin", "exchange", border="lowest")) == replace(window, border="lowest")
    assert placed(halo("HaloSum", "sum")) == Shard(2, (4, 4))
    assert placed(halo("HaloStrips", "exchange")) == Shard(2, (1, 1))


def test_a_pool_counts_through_its_window():
    window = Window(2, ((-1, 5), (3, 9)), 8, "lowest")
    node = Node("MaxPool", ["x"], ["y", "at"], attributes={"kernel_shape": [3]})
    pool_member(node, Strategy((window,), (Shard(2, (4, 4)),) * 2, masked=True), "h", (1, 1, 8))
    assert (node.op_type, node.domain) == ("MemberMaxPool", SPMD)
    assert counted_as(node, window)
    for other in (replace(window, dim=3), replace(window, length=9), Window(2, ((-1, 5), (4, 9)), 8), Shard(2, (4, 4))):
        assert not counted_as(node, other)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_pool_of_nothing_but_the_lowest_takes_the_first_place(dtype):
    """And not the border, which is as low."""
    lowest = -np.inf if dtype.startswith("float") else -128
    values = {"x0": np.full((1, 2, 8, 3), lowest, dtype)}
    values["x0"][0, 1, 5, 1] = 1
    given = {"kernel_shape": [4, 2], "pads": [3, 1, 3, 0]}
    node = Node("MaxPool", ["x0"], ["y0", "y1"], attributes=given)
    whole = run([node], values, ["y0", "y1"], 20)
    made = swept(node, values, {"x0": Shard(2, (5, 3))})
    held = simulated(made.graph, {"x0": Shard(2, (5, 3)), **made.placements}, values, 2)
    assert "MemberMaxPool" in [each.op_type for each in made.graph.nodes]
    for name, expected in zip(("y0", "y1"), whole):
        assert (np.concatenate(held[name], 2) == expected).all()


def test_of_a_whole_operand_each_member_cuts_its_window():
    """The gradient of a weight reads a whole image beside a split gradient."""
    generator = np.random.default_rng(2)
    values = {
        "x0": generator.standard_normal((1, 2, 9)).astype("f4"),
        "x1": generator.standard_normal((3, 2, 7)).astype("f4"),
    }
    node = Node("Conv", ["x0", "x1"], ["y0"], attributes={"pads": [1, 1]})
    (whole,) = run([node], values, ["y0"], 20)
    made = swept(node, values, {"x1": Shard(2, (4, 3))})
    held = simulated(made.graph, {"x1": Shard(2, (4, 3)), **made.placements}, values, 2)
    kinds = [each.op_type for each in made.graph.nodes]
    assert kinds == ["HaloJoin", "Conv"], "nothing is sent, and the results are terms"
    np.testing.assert_allclose(sum(held["y0"]), whole, 1e-5, 1e-5)
    assert not any(each.domain == COMM for each in made.graph.nodes)
