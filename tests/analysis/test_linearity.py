"""What an operator is said to do to the value it follows, held against what it does to numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Builder, run_graph
from onnx import helper, numpy_helper
from operator_forms import forms
from operator_probes import Probe, probes

from gopt.analysis.linearity import CONSTANT, Linearity, level, propagate_linearity
from gopt.errors import InputError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.ir.load import load
from gopt.operators.table import OPERATORS


def zeros(b: Builder) -> str:
    return b.const(np.zeros((3, 4)))


def other(b: Builder) -> str:
    return b.const(np.linspace(0.5, 2, 12).reshape(3, 4))


def mask(b: Builder) -> str:
    return b.const(np.arange(12).reshape(3, 4) % 3 > 0, "bool")


def one_hot(b: Builder) -> str:
    return b.const([[0, 1, 2, 3]] * 3, "int64")


CASES = {
    "neg": (lambda b, v: b.op("Neg", v), Linearity.HOMOGENEOUS),
    "transpose": (lambda b, v: b.op("Transpose", v, perm=[1, 0]), Linearity.HOMOGENEOUS),
    "times a constant": (lambda b, v: b.op("Mul", other(b), v), Linearity.HOMOGENEOUS),
    "over a constant": (lambda b, v: b.op("Div", v, other(b)), Linearity.HOMOGENEOUS),
    "under a constant": (lambda b, v: b.op("Div", other(b), v), Linearity.NONLINEAR),
    "plus a constant": (lambda b, v: b.op("Add", v, other(b)), Linearity.AFFINE),
    "minus zero": (lambda b, v: b.op("Sub", v, zeros(b)), Linearity.HOMOGENEOUS),
    "minus its mean": (lambda b, v: b.op("Sub", v, b.op("ReduceMean", v, keepdims=1)), Linearity.HOMOGENEOUS),
    "squared": (lambda b, v: b.op("Mul", v, v), Linearity.NONLINEAR),
    "over its norm": (lambda b, v: b.op("Div", v, b.op("ReduceL2", v, keepdims=0)), Linearity.NONLINEAR),
    "a product with a matrix": (
        lambda b, v: b.op("MatMul", v, b.const(np.ones((4, 2)))), Linearity.HOMOGENEOUS,
    ),
    "gemm": (lambda b, v: b.op("Gemm", v, b.const(np.ones((4, 2)))), Linearity.HOMOGENEOUS),
    "gemm with an offset": (
        lambda b, v: b.op("Gemm", v, b.const(np.ones((4, 2))), b.const(np.ones(2))), Linearity.AFFINE,
    ),
    "masked with zero": (lambda b, v: b.op("Where", mask(b), v, zeros(b)), Linearity.HOMOGENEOUS),
    "masked with another": (lambda b, v: b.op("Where", mask(b), v, other(b)), Linearity.AFFINE),
    "chosen by itself": (
        lambda b, v: b.op("Where", b.op("Greater", v, zeros(b)), v, zeros(b)), Linearity.NONLINEAR,
    ),
    "clipped": (lambda b, v: b.op("Clip", v, b.const(-0.3), b.const(0.3)), Linearity.NONLINEAR),
    "to an integer and back": (lambda b, v: b.op("Cast", b.op("Cast", v, to=7), to=1), Linearity.NONLINEAR),
    "to a half and back": (lambda b, v: b.op("Cast", b.op("Cast", v, to=10), to=1), Linearity.HOMOGENEOUS),
    "put over zeros": (
        lambda b, v: b.op("ScatterElements", zeros(b), one_hot(b), v, axis=1), Linearity.HOMOGENEOUS,
    ),
    "added to others": (
        lambda b, v: b.op("ScatterElements", other(b), one_hot(b), v, axis=1, reduction="add"), Linearity.AFFINE,
    ),
    "padded": (lambda b, v: b.op("Pad", v, b.const([1, 0, 0, 1], "int64")), Linearity.HOMOGENEOUS),
    "padded with ones": (
        lambda b, v: b.op("Pad", v, b.const([1, 0, 0, 1], "int64"), b.const(1.0)), Linearity.AFFINE,
    ),
    "joined with itself": (lambda b, v: b.op("Concat", v, b.op("Neg", v), axis=0), Linearity.HOMOGENEOUS),
    "joined with another": (lambda b, v: b.op("Concat", v, other(b), axis=0), Linearity.AFFINE),
    "exp": (lambda b, v: b.op("Exp", v), Linearity.NONLINEAR),
    "running sum": (lambda b, v: b.op("CumSum", v, b.const(1, "int64")), Linearity.HOMOGENEOUS),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_the_claim_holds_in_numbers(what, tmp_path):
    """Homogeneous: f(av + bw) = a f(v) + b f(w). Affine: the same where a + b = 1. Nonlinear: neither."""
    way, claim = CASES[what]
    b = Builder()
    b.input("v", (3, 4))
    made = way(b, "v")
    b.output("out", b.op("Identity", made), None)
    graph = load(b.save(tmp_path / "g.onnx"))
    graph.outputs = {"out": graph.types.get("out", graph.outputs["out"])}
    found = propagate_linearity(GraphIndex(graph), graph.nodes, "v", {"v"})
    assert found[made] is claim
    generator = np.random.default_rng(3)
    one, two = (generator.standard_normal((3, 4)).astype(np.float32) for _ in range(2))

    def run(value: np.ndarray) -> np.ndarray:
        return run_graph(graph, {"v": value.astype(np.float32)})["out"].astype(np.float64)

    def superposes(a: float, c: float) -> bool:
        return np.allclose(run(a * one + c * two), a * run(one) + c * run(two), atol=5e-3)

    assert superposes(0.3, 0.7) == (claim <= Linearity.AFFINE)
    assert superposes(2.0, 0.5) == (claim <= Linearity.SCALED)


def test_a_factor_from_elsewhere_scales(tmp_path):
    b = Builder()
    b.input("v", (3, 4))
    b.input("count", ())
    product = b.op("Div", "v", "count")
    total = b.op("Add", product, "count")
    gated = b.op("Where", b.op("Greater", "count", b.const(1.0)), "v", zeros(b))
    b.output("out", b.op("Sum", total, gated), (3, 4))
    graph = load(b.save(tmp_path / "g.onnx"))
    tainted = {name for node in graph.nodes for name in node.outputs} | {"v", "count"}
    found = propagate_linearity(GraphIndex(graph), graph.nodes, "v", tainted)
    assert found[product] is Linearity.SCALED and found[gated] is Linearity.SCALED
    assert found[total] is Linearity.NONLINEAR


def test_values_behind_the_first_that_is_less_simple_are_left_out(tmp_path):
    b = Builder()
    b.input("v", (3, 4))
    turned = b.op("Neg", "v")
    shifted = b.op("Add", turned, other(b))
    late = b.op("Neg", shifted)
    b.output("out", b.op("Sub", late, turned), (3, 4))
    graph = load(b.save(tmp_path / "g.onnx"))
    index, enough = GraphIndex(graph), Linearity.HOMOGENEOUS
    found = propagate_linearity(index, graph.nodes, "v", {"v"}, enough)
    assert found == {"v": enough, turned: enough, shifted: Linearity.AFFINE}
    whole = propagate_linearity(index, graph.nodes, "v", {"v"})
    assert whole[late] > enough and whole["out"] > enough, "what is made of it is no simpler"


def index_of(op_type: str, probe: Probe, path: Path) -> GraphIndex:
    """A graph of one node, which holds the operands."""
    names = [f"x{place}" if each is not None else "" for place, each in enumerate(probe.inputs)]
    node = helper.make_node(
        op_type, names, [f"y{place}" for place in range(probe.case.results)], **probe.case.attributes
    )
    held = [numpy_helper.from_array(each, name) for name, each in zip(names, probe.inputs) if each is not None]
    ends = [helper.make_tensor_value_info("y0", helper.np_dtype_to_tensor_dtype(probe.result().dtype), None)]
    graph = helper.make_graph([node], "use", [], ends, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", probe.case.opset)], ir_version=8), path)
    return GraphIndex(load(path))


def joined(probe: Probe, places: list[int], claim: Linearity, generator: np.random.Generator) -> bool:
    """Whether the result is linear (or affine) in some operands that move together."""
    one, two = ({at: generator.standard_normal(probe.inputs[at].shape) for at in places} for _ in range(2))
    at_one, at_two = probe.result(one), probe.result(two)
    between = probe.result({at: one[at] / 4 + two[at] * 3 / 4 for at in places})
    found = np.allclose(between, at_one / 4 + at_two * 3 / 4, rtol=1e-6, atol=1e-9)
    if claim is not Linearity.AFFINE:
        found &= np.allclose(probe.result({at: 2 * one[at] for at in places}), 2 * at_one, rtol=1e-6, atol=1e-9)
    return bool(found)


@pytest.mark.parametrize(
    "op_type", sorted(name for name, each in OPERATORS.items() if forms(name) and any(each.slopes))
)
def test_no_operator_is_simpler_than_it_is_said_to_be(op_type, tmp_path):
    """Each operand alone, and each pair, in every use: against onnx's reference in float64."""
    generator = np.random.default_rng(4)
    for probe in probes(op_type, wide=True):
        try:
            index = index_of(op_type, probe, tmp_path / "m.onnx")
        except InputError:
            continue  # a type that the standard does not take
        node = index.graph.nodes[-1]
        present = [place for place, each in enumerate(probe.inputs) if each is not None]
        for moving in [[at] for at in probe.floats] + [[a, b] for a in probe.floats for b in probe.floats if a < b]:
            claim = level(index, node, [0 if place in moving else CONSTANT for place in present])
            if claim is not Linearity.NONLINEAR:
                assert joined(probe, moving, claim, generator), (moving, probe.case)


def test_a_number_that_an_attribute_sets_beside_the_elements_is_a_term(tmp_path):
    """A Resize that reads past the edges made of zeros was a zero, and linear; a Pad of an old operator set too."""
    b = Builder()
    b.input("v", (3, 4))
    region, sizes = b.const([-1.0, 0.0, 2.0, 1.0]), b.const([3, 4], "int64")
    crop = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 1.0}
    grown, made = (b.op("Resize", each, region, "", sizes, **crop) for each in ("v", zeros(b)))
    b.output("out", b.op("Add", grown, made), (3, 4))
    graph = load(b.save(tmp_path / "g.onnx"))
    index = GraphIndex(graph)
    assert propagate_linearity(index, graph.nodes, "v", {"v"})[grown] is Linearity.AFFINE
    assert not index.constants.zero(made)
    pad = Node("Pad", ["v"], ["p"], attributes={"pads": [0, 1, 0, 0], "value": 2.0})
    assert level(index, pad, [0]) is Linearity.AFFINE
