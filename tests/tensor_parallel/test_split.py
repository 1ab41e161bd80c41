"""Steps split along several axes: what propagation makes of them, and errors planted between two axes."""

from __future__ import annotations

import pytest
from helpers import source
from plants import change_attributes

from gopt.errors import InvariantError
from gopt.ir.graph import COMM
from gopt.records.mesh import Mesh
from gopt.records.placements import Shard
from gopt.tensor_parallel.axes import AxisRequest, split_axes
from gopt.tensor_parallel.check import check, check_together
from gopt.tensor_parallel.split import TensorParallelStep, split_step


def made(name: str, mesh: str, **options) -> TensorParallelStep:
    training = source(name).training
    return split_step(training, split_axes(training, Mesh.parse(mesh), AxisRequest(**options), print))


def calls(step: TensorParallelStep, axis: str) -> list[str]:
    return [n.op_type for n in step.graph.nodes if n.domain == COMM and n.attributes["group"] == axis]


def test_keys_and_values_are_gathered_along_cp_and_their_gradients_scattered():
    step = made("gpt_adamw", "cp=2")
    gathers = [n for n in step.graph.nodes if n.op_type == "AllGather" and n.phase.value == "forward"]
    scatters = [n for n in step.graph.nodes if n.op_type == "ReduceScatter"]
    assert len(gathers) == 4 and len(scatters) == 4, "two of each for each of two blocks"


def test_heads_are_exchanged_along_sp():
    assert calls(made("gpt_adamw", "sp=2"), "sp").count("AllToAll") >= 8
    assert "AllToAll" not in calls(made("gpt_adamw", "cp=2"), "cp")


def test_one_axis_leaves_the_calls_of_another_as_they_are():
    alone, beside = made("gpt_adamw", "tp=2"), made("gpt_adamw", "tp=2,cp=2")
    assert calls(alone, "tp") == calls(beside, "tp")


def test_products_are_never_computed_whole():
    for mesh in ("cp=2", "sp=2", "cp=2,tp=2"):
        step = made("gpt_adamw", mesh)
        labels = {node.label: node.op_type for node in step.graph.nodes}
        whole = {labels.get(label) for each in step.along for label in each.whole}
        assert not whole & {"MatMul", "Gemm"}, whole


def test_two_axes_of_one_dimension():
    step = made("gpt_adamw", "cp=2,tp=2", sequence=True)
    both = [each for each in step.shardings.values() if len({p.dim for _, p in each.by_axis}) < len(each.by_axis)]
    assert both, "tokens are shared out along cp, and each part along tp"
    for sharding in both:
        one, two = (place for _, place in sharding.by_axis)
        assert one.fits(two)


def test_parts_that_do_not_fit():
    with pytest.raises(InvariantError, match="'x' is sharded along dimension 0"):
        check_together({"tp": {"x": Shard(0, (4, 4))}, "cp": {"x": Shard(0, (4, 4))}})
    check_together({"tp": {"x": Shard(0, (4, 4))}, "cp": {"x": Shard(0, (2, 2), runs=2)}})


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_reduction_over_the_wrong_axis(axis):
    """The first call of one axis is made along the other: both sums are then wrong."""
    training = source("gpt_adamw").training
    splits = split_axes(training, Mesh.parse("cp=2,tp=2"), AxisRequest(), print)
    step = split_step(training, splits)
    other = {"tp": "cp", "cp": "tp"}[axis]
    call = next(n for n in step.graph.nodes if n.op_type == "AllReduce" and n.attributes["group"] == axis)
    change_attributes(step, call, group=other)
    seeds = next(each.seeds for each in splits if each.axis == axis)
    with pytest.raises(InvariantError, match="partial sum"):
        check(training, step.graph, axis, seeds, ("tp", "cp"))
