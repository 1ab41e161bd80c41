"""The gradient of a largest-value pool: which places are known to be in which windows."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from members import bare, run, simulated

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.records.placements import Shard
from gopt.tensor_parallel.pool_gradients import in_plane
from gopt.tensor_parallel.propagate import propagate

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
step (float[2,3,9,4] x, float[2,3,5,4] u) => (float[2,3,9,4] g)
<int64[2] first = {0, 0}, int64[2] one = {1, 1}, int64[2] places = {2, 3}, int64[3] flat = {2, 3, 20},
 int64[4] plane = {2, 3, 9, 4}, int64[3] size = {2, 3, 36}>
{
  y, at = MaxPool<kernel_shape = [3, 1], strides = [2, 1], pads = [1, 0, 1, 0]>(x)
  z, all = MaxPool<kernel_shape = [1, 1]>(x)
  base = Slice(all, first, one, places)
  own = Sub(at, base)
  indices = Reshape(own, flat)
  updates = Reshape(u, flat)
  zeros = ConstantOfShape(size)
  scattered = ScatterElements<axis = 2, reduction = "add">(zeros, indices, updates)
  g = Reshape(scattered, plane)
}
"""


def graph(tmp_path, *changes: tuple[str, str]) -> Graph:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "step.onnx")
    return load(tmp_path / "step.onnx")


def split(step: Graph, shard: Shard):
    """The step propagated from a split operand and split updates."""
    seeds = {"x": shard, "u": Shard(shard.dim, {(5, 4): (3, 2), (1, 8): (1, 4), (2, 2): (2, 2)}[shard.sizes])}
    return seeds, propagate(bare(step), step, "tp", len(shard.sizes), seeds)


@pytest.mark.parametrize("shard", [Shard(2, (5, 4)), Shard(2, (1, 8)), Shard(3, (2, 2))], ids=str)
def test_updates_reach_the_places_that_were_taken(tmp_path, shard):
    """Windows of 3 rows meet: two members have terms for the row between them."""
    step = graph(tmp_path)
    generator = np.random.default_rng(1)
    values = {"x": generator.standard_normal((2, 3, 9, 4)), "u": generator.standard_normal((2, 3, 5, 4))}
    values = {name: each.astype(np.float32) for name, each in values.items()}
    held = {name: each.numpy() for name, each in step.initializers.items()}
    (whole,) = run(step.nodes, {**held, **values}, ["g"], 20)
    seeds, made = split(step, shard)
    kinds = [node.op_type for node in made.graph.nodes]
    assert "WindowScatter" in kinds
    parts = simulated(made.graph, {**seeds, **made.placements}, values, 2)["g"]
    placement = made.placements.get("g")
    found = np.concatenate(parts, placement.dim) if isinstance(placement, Shard) else parts[0]
    np.testing.assert_allclose(found, whole, 1e-6, 1e-6)


def known(step: Graph) -> bool:
    return in_plane("indices", step, Constants(step), step.producers().get) is not None


def test_places_are_counted_through_a_plane(tmp_path):
    assert known(graph(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        [("kernel_shape = [1, 1]", "kernel_shape = [2, 1], pads = [1, 0, 0, 0]")],
        [("first = {0, 0}", "first = {1, 0}"), ("one = {1, 1}", "one = {2, 1}")],
        [("Sub(at, base)", "Sub(base, at)")],
        [("Sub(at, base)", "Add(at, base)")],
        [("[1, 0, 1, 0]>(x)", "[1, 0, 1, 0], storage_order = 1>(x)")],
        [("all = MaxPool<kernel_shape = [1, 1]>(x)", "all = MaxPool<kernel_shape = [1, 1]>(u)")],
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_taken_for_a_place(tmp_path, changes):
    assert not known(graph(tmp_path, *changes))


@pytest.mark.parametrize(
    "change",
    [('reduction = "add"', 'reduction = "max"'),
     ("zeros = ConstantOfShape(size)", "none = ConstantOfShape(size) zeros = Cos(none)")],
)  # fmt: skip
def test_another_scatter_is_made_whole(tmp_path, change):
    _, made = split(graph(tmp_path, change), Shard(2, (5, 4)))
    assert "WindowScatter" not in [node.op_type for node in made.graph.nodes]
