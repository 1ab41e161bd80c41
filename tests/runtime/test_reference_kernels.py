"""Operators that onnx's reference evaluator computes wrongly, against ONNX Runtime's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from node_models import session
from onnx import helper
from onnx.reference import ReferenceEvaluator

from gopt.runtime.fallback_kernels import operators


def held(op_type, shapes, outputs=1, opset=17, dtype=np.float32, scale=4, **attributes):
    """Raise AssertionError unless both engines compute the same. ``shapes``: of numbers that are drawn, or arrays."""
    random = np.random.default_rng(4)
    feeds = {
        f"i{k}": (random.standard_normal(each) * scale).astype(dtype) if isinstance(each, tuple) else each
        for k, each in enumerate(shapes)
    }
    feeds = {name: np.abs(value) if name == "i4" else value for name, value in feeds.items()}  # a variance
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = [f"o{k}" for k in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op_type, list(feeds), names, **attributes)], "one",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()],
        [helper.make_empty_tensor_value_info(name) for name in names],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    typed = model.__deepcopy__({})
    for k, info in enumerate(typed.graph.output):
        info.type.tensor_type.elem_type = 7 if op_type == "MaxPool" and k else code
    due = session(typed).run(None, feeds)
    found = ReferenceEvaluator(model, new_ops=list(operators())).run(None, feeds)
    assert len(found) == outputs
    for one, two in zip(found, due):
        assert one.dtype == two.dtype and one.shape == two.shape
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-6 if scale < 100 else 1e-3)


POOLS = [
    {"pads": [0, 1]}, {"strides": [2], "pads": [1, 0]}, {"dilations": [2]}, {"ceil_mode": 1, "strides": [2]},
    {"auto_pad": "SAME_LOWER", "strides": [2]},
]  # fmt: skip


@pytest.mark.parametrize("given", POOLS, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_pool(given, rank):
    wide = {
        name: [each for each in value for _ in range(rank)] if isinstance(value, list) else value
        for name, value in given.items()
    }
    held("MaxPool", [(2, 3, *(5, 6, 4)[:rank])], 2, kernel_shape=[2, 3, 2][:rank], **wide)
    held("MaxPool", [(2, 3, *(5, 6, 4)[:rank])], 2, kernel_shape=[2, 3, 2][:rank], storage_order=1, **wide)


def test_max_pool_of_whole_numbers():
    held("MaxPool", [(2, 3, 6)], dtype=np.int8, kernel_shape=[3], pads=[0, 2])


@pytest.mark.parametrize(("opset", "shape"), itertools.product((9, 13, 15), ((4, 3), (2, 3, 5), (2, 3, 4, 2))))
def test_batch_normalization(opset, shape):
    held("BatchNormalization", [shape, (3,), (3,), (3,), (3,)], opset=opset, epsilon=1e-2)
    if opset > 13:
        held("BatchNormalization", [shape, *[(3,)] * 4], 3, opset=opset, training_mode=1, momentum=0.7)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_lrn(size):
    held("LRN", [(2, 5, 3, 3)], size=size, alpha=0.3, beta=0.6, bias=2.0)
    held("LRN", [(5, 2, 3, 1)], size=size)


@pytest.mark.parametrize(("axis", "p"), itertools.product((0, 1, -1), (1, 2)))
def test_lp_normalization(axis, p):
    held("LpNormalization", [(3, 4)], axis=axis, p=p)


@pytest.mark.parametrize("opset", [9, 11, 13, 22])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 4), (0, 4), (2, 2, 3, 2)])
def test_shares_of_every_operator_set(op_type, opset, shape):
    for axis in (None, *range(-len(shape), len(shape))):
        if len(shape) > 1 or opset >= 13 or axis is not None:  # the default of a vector is outside of it
            held(op_type, [shape], opset=opset, scale=300, **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, 1, -1, -100])
@pytest.mark.parametrize("inner", [(), (4,)])
def test_losses_of_classes_with_large_numbers(reduction, weighted, ignored, inner):
    random = np.random.default_rng(5)
    labels = random.integers(0, 3, (5, *inner))
    labels[0] = 0 if ignored is None else ignored
    given = {} if ignored is None else {"ignore_index": ignored}
    operands = [(5, 3, *inner), labels, *([(3,)] if weighted else [])]
    held("SoftmaxCrossEntropyLoss", operands, 2, reduction=reduction, scale=300, **given)
    held("NegativeLogLikelihoodLoss", operands, reduction=reduction, scale=300, **given)
