"""Operators along a sharded dimension: what members make together is what the operator makes of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from members import Array, joined, run, simulated, swept

from gopt.ir.graph import Node
from gopt.ir.types import TensorType
from gopt.records.placements import REPLICATED, Placement, Replicated, Shard
from gopt.spmd.links import OperatorUse
from gopt.tensor_parallel.expansions import expansion

SIZES = ((4, 3), (0, 7), (1, 2, 4), (3, 0, 4))
GENERATOR = np.random.default_rng(5)


def agree(
    op_type: str,
    inputs: list[Array],
    seed: Placement,
    opset: int = 20,
    results: int = 1,
    tolerance: float = 1e-5,
    **attributes: object,
) -> set[str]:
    """Compare members with the whole; returns the kinds of nodes that stand for the operator."""  # fmt: skip
    names = [f"x{place}" for place in range(len(inputs))]
    outputs = [f"y{place}" for place in range(results)]
    values = dict(zip(names, inputs))
    node = Node(op_type, names, outputs, attributes=attributes)
    expected = run([node], values, outputs, opset)
    made = swept(node, values, {"x0": seed}, opset)
    assert isinstance(seed, Shard)
    count = len(seed.sizes)
    held = simulated(made.graph, {"x0": seed, **made.placements}, values, count)
    for name, whole in zip(outputs, expected):
        found = joined(held[name], made.placements.get(name, REPLICATED))
        assert found.dtype == whole.dtype
        assert found.shape == whole.shape
        np.testing.assert_allclose(found.astype(np.float64), whole.astype(np.float64), tolerance, tolerance)
    return {node.op_type for node in made.graph.nodes}


def numbers(*shape: int, dtype: str = "float32", scale: float = 1.0) -> Array:
    return np.asarray(scale * GENERATOR.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("opset", [12, 17, 20])
def test_softmax_over_members(op_type, sizes, opset):
    seed = Shard(2, sizes)
    kinds = agree(op_type, [numbers(3, 5, 7, scale=30)], seed, opset, axis=-1)
    assert kinds.isdisjoint({op_type, "AllGather"})


def test_an_old_softmax_normalises_over_all_that_is_behind_its_axis():
    agree("Softmax", [numbers(3, 7, 5)], Shard(1, (4, 3)), 11)
    agree("LogSoftmax", [numbers(3, 5, 7)], Shard(2, (4, 3)), 11)
    operator = described("Softmax", 12)
    node = Node("Softmax", ["x0"], ["y0"], attributes={})
    assert expansion(node, operator, [Shard(0, (2, 1))]) is None
    assert expansion(node, operator, [Shard(1, (2, 3))]) is not None


def described(op_type: str, opset: int) -> OperatorUse:
    type = TensorType("float32", (3, 5, 7))
    return OperatorUse(op_type, {}, (type,), (type,), lambda place: None, opset)


def test_softmax_in_several_runs():
    agree("Softmax", [numbers(3, 14)], Shard(1, (4, 3), runs=2))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op_type", ["ReduceL2", "ReduceMean", "ReduceLogSum", "ReduceLogSumExp"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("opset", [13, 18])
def test_reductions_over_members(op_type, sizes, keepdims, opset):
    value = np.abs(numbers(3, 7, 5)) + 0.1
    axes = [1, 2] if keepdims else [1]
    more = {"axes": axes} if opset < 18 else {}
    given = [] if more else [np.array(axes, np.int64)]
    seed = Shard(1, sizes)
    if not keepdims and 0 in sizes:
        return  # parts of nothing keep their dimensions
    kinds = agree(op_type, [value, *given], seed, opset, keepdims=keepdims, **more)
    assert op_type not in kinds


def test_a_mean_of_equal_parts_is_a_mean_of_means():
    assert "ReduceMean" in agree("ReduceMean", [numbers(3, 8), np.array([1])], Shard(1, (4, 4)))


@pytest.mark.parametrize("op_type", ["ReduceL2", "ReduceMean"])
def test_halves_do_not_overflow(op_type):
    """The sum, and that of squares, is beyond the largest half; the result is not."""
    agree(op_type, [np.full((2, 70), 1000, np.float16), np.array([1])], Shard(1, (33, 37)), tolerance=1e-3)


def test_a_norm_of_all():
    agree("ReduceL2", [numbers(33, 65)], Shard(0, (20, 13)), keepdims=0)


@pytest.mark.parametrize("sizes", SIZES[1:3])
@pytest.mark.parametrize("added", [(3,), (5, 1), (5, 3), ()])
def test_what_a_gemm_adds_is_added_once(sizes, added):
    agree("Gemm", [numbers(5, 7), numbers(7, 3), numbers(*added)], Shard(1, sizes), beta=0.5, alpha=2.0)
    agree("Gemm", [numbers(7, 5), numbers(3, 7), numbers(*added)], Shard(0, sizes), transA=1, transB=1)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_bias_of_a_convolution_is_added_once(sizes):
    agree("Conv", [numbers(2, 7, 5, 5), numbers(3, 7, 3, 3), numbers(3)], Shard(1, sizes), tolerance=1e-4, pads=[1] * 4)
    agree("ConvTranspose", [numbers(2, 7, 5), numbers(7, 3, 3), numbers(3)], Shard(1, sizes), tolerance=1e-4)


def test_groups_of_a_convolution_are_no_sum():
    node = Node("Conv", ["x0", "x1", "x2"], ["y0"], attributes={"group": 6})
    made = swept(
        node, {"x0": numbers(2, 6, 5), "x1": numbers(6, 1, 3), "x2": numbers(6)}, {"x0": Shard(1, (4, 2))}
    )  # fmt: skip
    (only,) = (each for each in made.graph.nodes if each.op_type == "Conv")
    assert made.placements["y0"] == Shard(1, (4, 2))
    assert len(only.inputs) == 3


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, places", [((4, 3), (3,)), ((3, 0, 4), ())])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighed, ignore", [(False, False), (True, False), (False, True), (True, True)])
def test_cross_entropy_over_classes_of_members(sizes, reduction, places, weighed, ignore):
    scores, labels = numbers(5, 7, *places, scale=8), GENERATOR.integers(0, 7, (5, *places))
    attributes: dict[str, object] = {"reduction": reduction}
    if ignore:
        labels[:2] = -1
        attributes["ignore_index"] = -1
    inputs = [scores, labels, *([np.abs(numbers(7))] if weighed else [])]
    kinds = agree("SoftmaxCrossEntropyLoss", inputs, Shard(1, sizes), results=2, **attributes)
    assert kinds.isdisjoint({"SoftmaxCrossEntropyLoss", "AllGather"}), "nobody needs all classes"
    kinds = agree("NegativeLogLikelihoodLoss", inputs, Shard(1, sizes), **attributes)
    assert kinds.isdisjoint({"NegativeLogLikelihoodLoss", "AllGather"})


@pytest.mark.parametrize("opset", [12, 13])
def test_cross_entropy_of_old_sets_and_of_halves(opset):
    inputs = [numbers(5, 7, 3, scale=8), GENERATOR.integers(0, 7, (5, 3)).astype(np.int32)]
    agree("SoftmaxCrossEntropyLoss", inputs, Shard(1, (4, 3)), opset, results=2)
    inputs[0] = inputs[0].astype(np.float16)
    agree("SoftmaxCrossEntropyLoss", inputs, Shard(1, (4, 3)), 20, results=2, tolerance=2e-3)


def test_an_ignored_sample_may_be_impossible():
    """The logarithm of nothing, weighted with nothing, must not reach the loss."""
    logs = np.log(np.array([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]], np.float32), where=[[False, True, True]] * 2, out=None)
    logs = np.where(np.array([[True, False, False], [False] * 3]), -np.inf, np.nan_to_num(logs, nan=-1)).astype("f4")
    node = Node("NegativeLogLikelihoodLoss", ["x0", "x1"], ["y0"], attributes={"ignore_index": 0, "reduction": "sum"})
    values = {"x0": logs, "x1": np.array([0, 2])}
    made = swept(node, values, {"x0": Shard(1, (2, 1))})
    held = simulated(made.graph, {"x0": Shard(1, (2, 1)), **made.placements}, values, 2)
    assert np.isfinite(held["y0"][0])


def test_other_operators_stay_as_they_are():
    assert expansion(Node("Softmax", ["x0"], ["y0"], domain="com.microsoft"), described("Softmax", 20), []) is None
    assert expansion(Node("Softmax", ["x0"], ["y0"]), described("Softmax", 20), [Replicated()]) is None
    assert expansion(Node("Softmax", ["x0"], ["y0"]), described("Softmax", 20), [Shard(0, (2, 1))]) is None


@pytest.mark.parametrize(
    ("kind", "dim", "written"), [("Conv", 1, True), ("Conv", 2, False), ("ConvTranspose", 2, True)]
)
def test_a_bias_is_added_behind_a_sum_alone(kind, dim, written):
    """Places of a convolution are whole: another operator for the bias would round halves once more."""
    types = [TensorType("float16", shape) for shape in ((1, 2, 4, 4), (2, 2, 3, 3), (2,), (1, 2, 4, 4))]
    attributes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    use = OperatorUse(kind, attributes, tuple(types[:3]), (types[3],), lambda _: None, 20)
    sizes = (1, 1) if dim == 1 else (2, 2)
    made = expansion(Node(kind, ["x", "w", "b"], ["y"], attributes=attributes), use, [Shard(dim, sizes)])
    assert (made is not None) == written
