"""Every standard operator: its derivatives beside difference quotients, or its refusal by name."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from derivatives import Arrays, Runner, backward_of, reference, runtime, scalar_model, worst_error
from onnx import ModelProto, helper, numpy_helper
from operator_cases import CASES, DEPRECATED, EXACT, HISTORY, NO_FLOATS, RUNTIME, Case
from operator_cases.window import POOLS
from products import part

from gopt.autodiff import refusals, rewrites
from gopt.autodiff.differentiate import differentiate
from gopt.errors import UnsupportedError

REFUSED = [case for case in CASES if case.refused]
SMOOTH = [case for case in CASES if not case.refused]
EVERY_VERSION = [
    pytest.param(case, version, id=f"{case.label}-{version}", marks=() if not place else pytest.mark.slow)
    for case in SMOOTH
    for place, version in enumerate(case.versions)
]


def prepared(case: Case, version: int) -> tuple[ModelProto, Arrays, Runner]:
    """The model whose ``loss`` weighs the elements of ``y``, its inputs, and what runs it."""
    values, text = case.arrays(), case.text
    if case.how == RUNTIME:
        values = {name: each.astype(np.float32) if each.dtype == np.float64 else each for name, each in values.items()}
        text = text.replace("double", "float").replace("to=11", "to=1")
    words = {"float64": "double", "float32": "float"}
    given = ", ".join(
        f"{words.get(str(values[name].dtype), values[name].dtype)}[{','.join(map(str, values[name].shape))}] {name}"
        for name in values
        if name in case.by
    )
    header = f'<ir_version: 10, opset_import: ["" : {version}]>'
    model = onnx.parser.parse_model(f"{header}\ng ({given}) => (y) {{ {text} }}")
    constants = {name: each for name, each in values.items() if name not in case.by}
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in constants.items())
    inputs = {name: each for name, each in values.items() if name in case.by}
    run = runtime if case.how == RUNTIME else reference
    y = np.ones(1, next(iter(inputs.values())).dtype) if case.refused else np.asarray(run(model, inputs)["y"])
    weights = np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype)
    return scalar_model(list(model.graph.node), inputs, constants, "y", weights, version), inputs, run


@pytest.mark.parametrize(("case", "version"), part(EVERY_VERSION, 260))
def test_derivatives_are_quotients(case: Case, version: int):
    model, inputs, run = prepared(case, version)
    exact = case.how == EXACT and all(each.dtype == np.float64 for each in inputs.values())
    assert worst_error(model, inputs, case.by, run, 1e-6 if exact else 3e-3) < (1e-6 if exact else 5e-3)


@pytest.mark.parametrize("case", REFUSED, ids=[case.label for case in REFUSED])
def test_an_operator_without_a_derivative_is_refused_by_name_and_passes_aside(case: Case):
    """It is refused between an input and the loss. It passes where the loss does not depend on it, and where it reads
    nothing that is differentiated by."""
    model, _, _ = prepared(case, case.versions[0])
    with pytest.raises(UnsupportedError) as caught:
        differentiate(model, "loss", list(case.by))
    assert re.search(case.refused, str(caught.value)) and caught.value.hints
    other = helper.make_tensor_value_info("other", model.graph.output[0].type.tensor_type.elem_type, [3])
    aside = ModelProto()
    aside.CopyFrom(model)
    aside.graph.input.append(other)
    aside.graph.node.append(helper.make_node("ReduceSum", ["other"], ["aside"], keepdims=0))
    output = aside.graph.output.add()
    output.CopyFrom(model.graph.output[0])
    output.name = "aside"
    made = differentiate(aside, "aside", ["other", *case.by])
    assert list(made.gradients) == ["other"] and set(made.unread) == set(case.by)


def test_every_operator_has_a_case():
    """Up to the operator set NEWEST. One that a newer onnx adds has none: ``python docs/operators.py`` shows it."""
    known = {case.operator for case in CASES}
    assert known | (NO_FLOATS & set(HISTORY)) | DEPRECATED == set(HISTORY)
    assert not known & (NO_FLOATS | DEPRECATED)
    assert all(each.deprecated for name in DEPRECATED for each in HISTORY[name][-1:])


def test_operators_without_floats_take_none():
    """Their operands hold no floating-point numbers, or there are none: no derivative goes through them."""
    for name in NO_FLOATS & set(HISTORY):
        newest = max(HISTORY[name], key=lambda each: each.since_version)
        assert not [each.name for each in newest.inputs if "tensor(float)" in each.types], name


TIED = {
    **{f"MaxPool, {kind}": (f"y = MaxPool<{attributes}>(x)", 1) for kind, attributes in POOLS},
    **{f"MaxPool and indices, {kind}": (f"y, i = MaxPool<{attributes}>(x)", 1) for kind, attributes in POOLS[:3]},
    "MaxPool, column major": ("y, i = MaxPool<kernel_shape=[2, 2], storage_order=1>(x)", 1),
    "GlobalMaxPool": ("y = GlobalMaxPool(x)", 1),
    "ReduceMax": ("y = ReduceMax<keepdims=0>(x, axes)", 1),
    "ReduceMin": ("y = ReduceMin(x, axes)", -1),
    "Max": ("z = Transpose<perm=[1, 0, 2, 3]>(x) y = Max(x, z, half)", 1),
    "Min": ("z = Transpose<perm=[1, 0, 2, 3]>(x) y = Min(z, x)", -1),
    "TopK": ("y, i = TopK(x, count)", 0),
    "Relu": ("y = Relu(x)", 1),
    "LeakyRelu": ("y = LeakyRelu(x)", 1),
    "Abs": ("y = Abs(x)", 1),
    "ReduceL1": ("y = ReduceL1(x, axes)", 1),
}
"""Nodes whose results are convex (1), concave (-1), or convex in all together (0): ties and zeros have subgradients."""


@pytest.mark.parametrize("kind", TIED)
def test_the_derivative_where_elements_tie_is_a_subgradient(kind: str):
    """A convex loss lies nowhere below the plane that a subgradient says. One that gave a tie's derivative twice, or
    to none of those that tie, would lie above it somewhere."""
    text, sign = TIED[kind]
    random = np.random.default_rng(7)
    x = random.integers(-1, 2, (2, 2, 5, 6)).astype(np.float32)
    constants = {"axes": np.array([1, 3]), "half": np.array(0, np.float32), "count": np.array([4])}
    given = {name: each for name, each in constants.items() if name in text}
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]>\ng (float[2,2,5,6] x) => (y) {{ {text} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in given.items())
    y = runtime(model, {"x": x})["y"]
    weights = np.asarray(random.uniform(0.5, 1.5, y.shape) * sign if sign else np.ones(y.shape), y.dtype)
    model = scalar_model(list(model.graph.node), {"x": x}, given, "y", weights, 20)
    backward, names = backward_of(model, ["x"])
    made = runtime(backward, {"x": x})
    slope = made[names["x"]].astype(np.float64)
    for turn in range(60):
        move = random.standard_normal(x.shape) if turn % 2 else random.integers(-1, 2, x.shape)
        there = (x + move).astype(np.float32)
        loss = float(runtime(model, {"x": there})["loss"])
        assert loss >= float(made["loss"]) + float((slope * (there - x)).sum()) - 1e-3


SILENT = ["Det-plain", "OneHot-values", "Pad-value is trained", "BatchNormalization-statistics", "SpaceToDepth-CRD",
          "ReduceMean-empty list", "ReduceMax-empty list, no dims", "ReduceL1-no-op", "ReduceProd-zeros",
          "CumProd-zeros"]  # fmt: skip


@pytest.mark.parametrize("label", SILENT)
def test_what_onnx_ad_gets_wrong_is_seen(label: str, monkeypatch: pytest.MonkeyPatch):
    """Without gopt's refusals and rewrites the derivatives are wrong, and the comparison says so."""
    monkeypatch.setattr(refusals, "REFUSALS", {})
    monkeypatch.setattr(rewrites, "REWRITES", {})
    case = next(case for case in CASES if case.label == label)
    plain = Case(case.operator, case.variant, case.text, case.by, case.values, case.since, "", case.how, case.until)
    model, inputs, run = prepared(plain, plain.versions[0])
    assert worst_error(model, inputs, case.by, run, 1e-6) > 1e-2


def test_operators_of_other_domains_are_refused():
    """onnx-ad would differentiate them as ONNX's of the same name."""
    text = '<ir_version: 10, opset_import: ["" : 20, "my.ops" : 1]> g (float[3] x) => (float loss)'
    model = onnx.parser.parse_model(f"{text} {{ y = my.ops.Tanh(x) loss = ReduceSum<keepdims=0>(y) }}")
    model.graph.value_info.append(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3]))
    said = "Tanh 'y' cannot be differentiated by 'x': it is not an operator of ONNX"
    with pytest.raises(UnsupportedError, match=said):
        differentiate(model, "loss", ["x"])


def test_reductions_over_nothing_in_a_body_are_refused():
    """Rewrites stop at bodies of control flow."""
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[3] x, bool c) => (float loss) {
        y = If (c) <then_branch = a () => (float[1] p)
                        { none = Constant<value = int64[0] {}>() p = ReduceMean(x, none) },
                    else_branch = b () => (float[1] q) { q = ReduceMax(x) }>
        loss = ReduceSum<keepdims=0>(y) }"""
    with pytest.raises(UnsupportedError, match=r"ReduceMean 'p' .* its list of axes is empty"):
        differentiate(onnx.parser.parse_model(text), "loss", ["x"])


@pytest.mark.parametrize("product", ["ReduceProd(x, axis)", "CumProd(x, place)"])
def test_products_in_a_body_are_refused(product: str):
    """onnx-ad divides by elements, and a body may be given a zero that no drawn batch has."""
    size = 1 if "Reduce" in product else 3
    text = f"""<ir_version: 10, opset_import: ["" : 26]> g (float[3] x, bool c) => (float loss) {{
        axis = Constant<value = int64[1] {{0}}>() place = Constant<value = int64 {{0}}>()
        y = If (c) <then_branch = a () => (float[{size}] p) {{ p = {product} }},
                    else_branch = b () => (float[{size}] q) {{ q = Identity(x) }}>
        loss = ReduceSum<keepdims=0>(y) }}"""
    with pytest.raises(UnsupportedError, match=r"Prod 'p' .* divides by elements that may be zero"):
        differentiate(onnx.parser.parse_model(text), "loss", ["x"])


def test_every_refusal_has_a_case():
    """Of those that rewrites leave in bodies alone, the tests above have some."""
    refused = {case.operator for case in REFUSED}
    assert set(refusals.REFUSALS) - refused <= set(rewrites.REWRITES)
