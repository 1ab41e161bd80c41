"""Derivatives of convolutions by data, weight and bias, beside differences of the loss, which is linear in each."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
from derivatives import backward_of, runtime, scalar_model, worst_error
from onnx import TensorProto, helper
from products import part

from gopt.autodiff import convolutions
from gopt.autodiff.differentiate import differentiate
from gopt.errors import UnsupportedError

SIZES = (7, 8, 6)
CASES = [
    (op_type, rank, channels, kernel, stride, dilation, pads)
    for op_type, rank, channels, kernel, stride, dilation, pads in itertools.product(
        ("Conv", "ConvTranspose"), (1, 2, 3), ((1, 2, 3), (2, 4, 6), (3, 3, 3), (3, 3, 6)), (1, 3), (1, 2, 3), (1, 2),
        ("none", "one side", "SAME_UPPER", "SAME_LOWER", "VALID", "output_padding", "output_shape"),
    )
    if (op_type == "ConvTranspose" or "output" not in pads)
    and not (op_type == "Conv" and dilation > 1 and "SAME" in pads)  # no runtime has them
    and not (pads == "output_padding" and stride == 1)
    and not (op_type == "Conv" and rank == 3 and kernel == 3 and dilation == 2 and "SAME" not in pads)  # too wide
]  # fmt: skip
"""Channels: groups, of the input, of the result."""


def convolution(case: tuple) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    op_type, rank, (groups, given, made), kernel, stride, dilation, pads = case
    sizes, kernels = SIZES[:rank], [*[kernel] * (rank - 1), kernel + 1]
    attributes = {"group": groups, "strides": [stride] * rank, "dilations": [dilation] * rank}
    if pads in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        attributes["auto_pad"] = pads
    elif pads == "output_shape":
        spans = [stride * (size - 1) + dilation * (k - 1) + 1 for size, k in zip(sizes, kernels)]
        attributes["output_shape"] = [max(span - 1, size) for span, size in zip(spans, sizes)]
    else:
        attributes["pads"] = [int(pads == "one side")] * rank + [0] * rank
        if pads == "output_padding":
            attributes["output_padding"] = [stride - 1] * rank
    random = np.random.default_rng(0)
    shapes = {"x": (2, given, *sizes), "b": (made,)}
    shapes["w"] = (made, given // groups, *kernels) if op_type == "Conv" else (given, made // groups, *kernels)
    values = {name: random.standard_normal(shapes[name]).astype(np.float32) for name in "xwb"}
    node = helper.make_node(op_type, ["x", "w", "b"], ["y"], **attributes)
    graph = helper.make_graph([node], "shape", [], [helper.make_empty_tensor_value_info("y")])
    for name, value in values.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
    y = runtime(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), values)["y"]
    return scalar_model([node], values, {}, "y", random.standard_normal(y.shape).astype(np.float32), 20), values


@pytest.mark.parametrize("op_type, rank, channels, kernel, stride, dilation, pads", part(CASES, 60))
def test_derivatives_are_quotients(op_type, rank, channels, kernel, stride, dilation, pads):
    model, values = convolution((op_type, rank, channels, kernel, stride, dilation, pads))
    assert worst_error(model, values, "xwb", runtime, 0.5) < 2e-3


def test_pads_at_the_other_side_are_seen(monkeypatch: pytest.MonkeyPatch):
    model, values = convolution(("Conv", 2, (2, 4, 6), 3, 2, 1, "one side"))
    true = convolutions.window_of

    def planted(operator):
        window = true(operator)
        return replace(window, pads=window.pads[2:] + window.pads[:2])

    monkeypatch.setattr(convolutions, "window_of", planted)
    assert worst_error(model, values, "xwb", runtime, 0.5) > 0.1


def model_of(text: str, shapes: dict[str, tuple[int, ...]]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model of a text, with values for its inputs."""
    random = np.random.default_rng(2)
    values = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    head = '<ir_version: 10, opset_import: ["" : 20]>'
    return onnx.parser.parse_model(f"{head}\ng ({given}) => (float loss) {{ {text} }}"), values


@pytest.mark.parametrize("behind", ["loss = Add(f, h)", "fh = Add(f, h) loss = Add(fh, k)"])
def test_weights_that_are_computed_shared_and_chained(behind: str):
    """Weight normalisation in front of two depthwise convolutions that share the weight. The first result is read
    twice. A third convolution leads to a Floor, through which no derivative goes."""
    shapes = {"x": (2, 4, 5, 5), "v": (4, 1, 3, 3), "scale": (4, 1, 1, 1)}
    forward = """axes = Constant<value_ints=[1, 2, 3]>() square = Mul(v, v) norm = ReduceSum(square, axes)
        root = Sqrt(norm) unit = Div(v, root) w = Mul(unit, scale) a = Conv<group=4, pads=[1,1,1,1]>(x, w) b = Tanh(a)
        c = ConvTranspose<group=4, strides=[2,2]>(b, w) d = Conv<group=4>(c, w) flat = Floor(d) e = Sub(a, b)
        f = ReduceSumSquare<keepdims=0>(c) h = ReduceSumSquare<keepdims=0>(e) k = ReduceSum<keepdims=0>(flat)"""
    smooth, values = model_of(f"{forward} loss = Add(f, h)", shapes)
    model, _ = model_of(f"{forward} {behind}", shapes)
    assert worst_error(smooth, values, list(shapes), runtime, 1e-2) < 1e-2
    expected = runtime(backward_of(smooth, list(shapes))[0], values)
    backward, names = backward_of(model, list(shapes))
    made = runtime(backward, values)
    for name in names.values():
        np.testing.assert_allclose(made[name], expected[name], rtol=1e-4, atol=1e-4)


def test_a_convolution_inside_a_body_is_refused_by_name():
    model, _ = model_of(
        """one = Constant<value = bool {1}>()
        y = If (one_or_zero) <then_branch = t () => (float[2,4,3,3] p) { p = Conv<group=4>(x, w) },
                              else_branch = e () => (float[2,4,3,3] q) { q = Identity(z) }>
        loss = ReduceSum<keepdims=0>(y)""",
        {"x": (2, 4, 5, 5), "w": (4, 1, 3, 3), "z": (2, 4, 3, 3)},
    )  # fmt: skip
    model.graph.input.append(helper.make_tensor_value_info("one_or_zero", TensorProto.BOOL, []))
    with pytest.raises(UnsupportedError, match="grouped Conv"):
        differentiate(model, "loss", ["w"])
