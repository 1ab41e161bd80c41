"""What an operator is said to do to the value it follows, held against what it does to numbers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Builder

from gopt.analysis.linearity import Linearity, propagate_linearity
from gopt.ir.graph_index import GraphIndex
from gopt.ir.load import load
from gopt.runtime.reference_eval import run_graph


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
