"""Right ranks of a split computation are proven by laws that few fixtures need, and ranks with an error are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto
from test_split_holes import model, two

import gopt

PADDED = "s = Relu(g) n = ConstantOfShape(z) c = Concat<axis=0>(s,n) a = Add(m,c) b = Mul(a,m) o = Sqrt(b)"
SQUARES = "s = Relu(g) n = ConstantOfShape(z) c = Concat<axis=0>(s,n) a = Mul(c,c) {} = ReduceSum<keepdims=0>(a)"
COLUMNS = {"inputs": {"m": {"split": ["", "tp"]}, "g": {"split": ["", "tp"]}}, "outputs": {"o": {"split": ["", "tp"]}}}
ROWS = {"inputs": {"m": {"split": ["tp", ""]}}, "outputs": {"o": {"split": ["tp", ""]}}}
WHOLE = "(float[16,8] m, float[6,8] g) => (float[16,8] o)"
LOWER = "(float[8,8] m, float[6,8] g) => (float[8,8] o)"
CHANNELS = "(float[2,2,3,3] x, float[5,2,1,1] w, float[5] b) => (float[2,5,3,3] o)"
PACKED = "(float[3] x, float[5] y) => (float[8] o)"
SINK = "h = Reshape(s,k) e = Expand(h,f) c = Concat<axis=2>(x,e) p = Softmax<axis=2>(c) o = Slice(p,z,t,a)"
SINKS = "int64[3] f={{2,{},1}}, int64[3] k={{2,1,1}}, int64[1] z={{0}}, int64[1] t={{6}}, int64[1] a={{2}}"
LAWS: dict[str, tuple[ModelProto, list[ModelProto], list[ModelProto], dict[str, Any]]] = {
    "columns of rows and constant rows": (
        model(WHOLE, PADDED, "int64[2] z={10,8}"),
        two("(float[16,4] m, float[6,4] g) => (float[16,4] o)", PADDED, "int64[2] z={10,4}"),
        two("(float[16,4] m, float[6,4] g) => (float[16,4] o)", PADDED.replace("(s,n)", "(n,s)"), "int64[2] z={10,4}"),
        COLUMNS,
    ),
    "rows and constant rows": (
        model(WHOLE, PADDED, "int64[2] z={10,8}"),
        [model(LOWER, PADDED, "int64[2] z={2,8}"), model(LOWER, "b = Mul(m,m) o = Sqrt(b)")],
        [model(LOWER, PADDED, "int64[2] z={2,8}"), model(LOWER, "t = Add(m,m) b = Mul(t,m) o = Sqrt(b)")],
        ROWS,
    ),
    "squares of rows and constant rows": (
        model("(float[6,8] g) => (float o)", SQUARES.format("o"), "int64[2] z={10,8}"),
        [model("(float[6,8] g) => (float o)", SQUARES.format("q"), "int64[2] z={2,8}", call="sum"),
         model("(float[6,8] g) => (float o)", "", "float q={0}", call="sum")],
        [model("(float[6,8] g) => (float o)", SQUARES.format("q"), "int64[2] z={2,8}", call="sum"),
         model("(float[6,8] g) => (float o)", "", "float q={1}", call="sum")],
        {},
    ),
    "a pad of a row": (
        model(PACKED, "p = Pad(x,b) q = Pad(y,f) o = Add(p,q)", "int64[2] b={0,5}, int64[2] f={3,0}"),
        two(PACKED, "o = Concat<axis=0>(x,y)"),
        two(PACKED, "o = Concat<axis=0>(y,x)"),
        {},
    ),
    "a bias of a convolution over channels in parts": (
        model("(float[2,4,3,3] x, float[5,4,1,1] w, float[5] b) => (float[2,5,3,3] o)", "o = Conv(x,w,b)"),
        [model(CHANNELS, "q = Conv(x,w,b)", call="sum"), model(CHANNELS, "q = Conv(x,w)", call="sum")],
        two(CHANNELS, "q = Conv(x,w,b)", call="sum"),
        {"inputs": {name: {"split": ["", "tp", "", ""]} for name in ("x", "w")}},
    ),
    "places from the end": (
        model("(float[4,6] x) => (float[4,2] o)", "o = Gather<axis=1>(x,i)", "int64[2] i={-1,0}"),
        two("(float[4,6] x) => (float[4,2] o)", "o = Gather<axis=1>(x,i)", "int64[2] i={5,-6}"),
        two("(float[4,6] x) => (float[4,2] o)", "o = Gather<axis=1>(x,i)", "int64[2] i={4,0}"),
        {},
    ),
    "a single place, along an axis from the end": (
        model("(float[4,6,3] x) => (float[4,6] o)", "g = Gather<axis=-1>(x,i) o = Tanh(g)", "int64 i={1}"),
        two("(float[2,6,3] x) => (float[2,6] o)", "g = Gather<axis=2>(x,i) o = Tanh(g)", "int64 i={1}"),
        two("(float[2,6,3] x) => (float[2,6] o)", "g = Gather<axis=2>(x,i) o = Tanh(g)", "int64 i={2}"),
        {"inputs": {"x": {"split": ["tp", "", ""]}}, "outputs": {"o": {"split": ["tp", ""]}}},
    ),
    "attention beside a sink": (
        model("(float[2,8,6] x, float[2] s) => (float[2,8,6] o)", SINK, SINKS.format(8)),
        two("(float[2,4,6] x, float[2] s) => (float[2,4,6] o)", SINK, SINKS.format(4)),
        two("(float[2,4,6] x, float[2] s) => (float[2,4,6] o)", SINK.replace("x,e", "e,x"), SINKS.format(4)),
        {"inputs": {"x": {"split": ["", "tp", ""]}}, "outputs": {"o": {"split": ["", "tp", ""]}}},
    ),
    "an operator on a constant": (
        model("(float[4,4] x) => (float[4,4] o)", "s = Sqrt(c) o = Mul(x,s)", "float[1,4] c={2,2,2,2}"),
        two("(float[4,2] x) => (float[4,2] o)", "s = Sqrt(c) o = Mul(x,s)", "float[1,2] c={2,2}"),
        two("(float[4,2] x) => (float[4,2] o)", "s = Sqrt(c) o = Mul(x,s)", "float[1,2] c={3,3}"),
        {"inputs": {"x": {"split": ["", "tp"]}}, "outputs": {"o": {"split": ["", "tp"]}}},
    ),
    "one sample beside another dimension of length 1": (
        model("(float[1,3,4] x, float[2,4,5] y) => (float[2,3,5] o)", "o = MatMul(x,y)"),
        two("(float[1,3,4] x, float[1,4,5] y) => (float[1,3,5] o)", "o = MatMul(x,y)"),
        two("(float[1,3,4] x, float[1,4,5] y) => (float[1,3,5] o)", "t = Add(x,x) o = MatMul(t,y)"),
        {"inputs": {"y": {"split": ["tp", "", ""]}}, "outputs": {"o": {"split": ["tp", "", ""]}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_a_right_split_is_proven_and_a_wrong_one_is_not(law: str, tmp_path: Path) -> None:
    source, right, wrong, relation = LAWS[law]
    onnx.save(source, tmp_path / "source.onnx")
    keys = {"format": "gopt-relation/1", "forward": True, "mesh": {"tp": 2}} | relation
    for ranks, proven in ((right, True), (wrong, False)):
        paths = [tmp_path / f"rank_{proven}_{index}.onnx" for index, _ in enumerate(ranks)]
        for path, rank in zip(paths, ranks):
            onnx.save(rank, path)
        assert gopt.prove(tmp_path / "source.onnx", ranks=paths, relation=keys).proven == proven
