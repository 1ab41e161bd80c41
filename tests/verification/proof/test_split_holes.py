"""Wrong ranks of a split computation that an adversary made by reading the laws: none is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto, helper, parser

import gopt

ROWS = "int64[1] z={0}, int64[1] f={4}, int64[1] e={8}, int64[1] a={1}"
EIGHT = "int64[4,1] i={0,1,2,3}, int64[2] s={6,4}"


def model(signature: str, text: str, constants: str = "", call: str = "") -> ModelProto:
    """A graph from text; ``call``: the reduction over tp that makes ``o`` of ``q``."""
    given = f"<{constants}>" if constants else ""
    made = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18, "gopt.comm" : 1]>\n g {signature} {given} {{ {text} }}'
    )
    if call:
        made.graph.node.append(helper.make_node("AllReduce", ["q"], ["o"], domain="gopt.comm", reduce=call, group="tp"))
    return made


def two(*arguments: str, **more: str) -> list[ModelProto]:
    return [model(*arguments, **more)] * 2


ONE = "(float[4,4] x) => (float[6,4] o)"
PADDED = model(ONE, "o = Concat<axis=0>(x, n)", "float[2,4] n={0,0,0,0,0,0,0,0}")
COLUMNS = {"inputs": {"x": {"split": ["", "tp"]}}}
ALL_ROWS = {"inputs": {"x": {"split": ["tp", ""]}}, "outputs": {"o": {"split": ["tp", ""]}}}
HOLES: dict[str, tuple[ModelProto, list[ModelProto], dict[str, Any]]] = {
    "a permuted value plus a value in order": (
        model("(float[4,8] x, float[4,8] y) => (float[4,8] o)", "o = Add(x, y)"),
        two(
            "(float[4,8] x, float[4,8] y) => (float[4,8] o)",
            "h = Slice(x,f,e,a) l = Slice(x,z,f,a) p = Concat<axis=1>(h,l) q = Add(p,y) "
            "h2 = Slice(q,f,e,a) l2 = Slice(q,z,f,a) o = Concat<axis=1>(h2,l2)",
            ROWS,
        ),
        {},
    ),
    "a permuted part of the source for the value": (
        model(
            "(float[4,8] x) => (float[4,8] o)",
            "h = Slice(x,f,e,a) l = Slice(x,z,f,a) p = Concat<axis=1>(h,l) o = Relu(p)", ROWS,
        ),
        two("(float[2,8] x) => (float[2,8] o)", "o = Relu(x)"),
        ALL_ROWS,
    ),
    **{
        f"rows written by {how}": (
            PADDED, two(ONE, f'n = ConstantOfShape(s) o = ScatterND<reduction="{how}">(n,i,x)', EIGHT), {}
        )
        for how in ("mul", "max", "min")
    },
    "the smallest of parts, and the largest of those": (
        model("(float[4,8] x) => (float[4,1] o)", "o = ReduceMin(x,a)", "int64[1] a={1}"),
        two("(float[4,4] x) => (float[4,1] o)", "q = ReduceMin(x,a)", "int64[1] a={1}", call="max"),
        COLUMNS,
    ),
    "parts of two sums in one product": (
        model(
            "(float[4,8] x, float[8] y) => (float[4,1] o)",
            "t = ReduceSum(x,a) p = Mul(t,y) o = ReduceSum(p,a)", "int64[1] a={1}",
        ),
        [
            model(
                "(float[4,8] x, float[8] y) => (float[4,1] o)",
                "w = Slice(x,z,f,a) t = ReduceSum(w,a) p = Mul(t,y) q = ReduceSum(p,a)", ROWS, "sum",
            ),
            model(
                "(float[4,8] x, float[8] y) => (float[4,1] o)",
                "t = ReduceSum(x,a) w = Slice(y,f,e,z) p = Mul(t,w) q = ReduceSum(p,a)", ROWS, "sum",
            ),
        ],
        {},
    ),
    "pieces of rows in another order": (
        model("(float[2,8] x) => (float[2,4] o)", "y = Relu(x) o = Slice(y,z,f,a)", ROWS),
        two(
            "(float[2,8] x) => (float[2,4] o)",
            "v = Reshape(x,m) p = Slice(v,n0,n2) b = Slice(v,n8,n10) c = Slice(v,n2,n4) d = Slice(v,n10,n12) "
            "w = Concat<axis=0>(p,b,c,d) q = Reshape(w,s) o = Relu(q)",
            "int64[1] m={-1}, int64[2] s={2,4}, int64[1] n0={0}, int64[1] n2={2}, int64[1] n4={4}, int64[1] n8={8}, "
            "int64[1] n10={10}, int64[1] n12={12}",
        ),
        {},
    ),
    "a mean of nothing": (
        model("(float[4,4] x) => (float[4,4] o)", "o = Relu(x)"),
        two(
            "(float[4,4] x) => (float[4,4] o)", "w = Slice(x,z,z,a) n = ReduceMean(w,a) r = Relu(x) o = Add(r,n)",
            "int64[1] z={0}, int64[1] a={0}",
        ),
        {},
    ),
    "a quotient of whole numbers": (
        model("(int64[4,8] x) => (int64[4,1] o)", "t = ReduceSum(x,a) o = Div(t,n)", "int64[1] a={1}, int64 n={2}"),
        two("(int64[4,4] x) => (int64[4,1] o)", "t = ReduceSum(x,a) q = Div(t,n)", "int64[1] a={1}, int64 n={2}",
            call="sum"),
        COLUMNS,
    ),
    "flags of columns for rows": (
        model("(float[4,4] x) => (float[6,4] o)", "y = Slice(x,z,t) o = Concat<axis=0>(y,n)",
              "int64[1] z={0}, int64[1] t={2}, float[4,4] n={0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}"),
        two(ONE, 'n = ConstantOfShape(s) u = Where(m,x,f) o = ScatterND<reduction="add">(n,i,u)',
            f"{EIGHT}, bool[1,4] m={{1,1,0,0}}, float f={{0}}"),
        {},
    ),
    "rows written behind zeros for zeros": (
        model("(float[4,4] x) => (float[6,4] o)", "o = Concat<axis=0>(n,x)", "float[2,4] n={0,0,0,0,0,0,0,0}"),
        two(ONE, "y = Neg(x) n = ConstantOfShape(s) o = ScatterND(n,i,y)",
            "int64[4,1] i={2,3,4,5}, int64[2] s={6,4}"),
        {},
    ),
    "other rows written behind zeros": (
        model("(float[4,4] x) => (float[6,4] o)", "n = ConstantOfShape(s) o = ScatterND(n,i,x)",
              "int64[4,1] i={2,3,4,5}, int64[2] s={6,4}"),
        two(ONE, "y = Neg(x) n = ConstantOfShape(s) o = ScatterND(n,i,y)",
            "int64[4,1] i={2,3,4,5}, int64[2] s={6,4}"),
        {},
    ),
    "zeros written over rows": (
        model("(float[4,4] x) => (float[6,4] o)", "y = Slice(x,z,t) o = Concat<axis=0>(y,n)",
              "int64[1] z={0}, int64[1] t={2}, float[4,4] n={0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}"),
        two(ONE, "n = ConstantOfShape(s) u = Where(m,x,f) o = ScatterND(n,i,u)",
            "int64[4,1] i={0,1,0,1}, int64[2] s={6,4}, bool[4,1] m={1,1,0,0}, float f={0}"),
        {},
    ),
    "indices of two dimensions with a mask for each": (
        model("(int64[4,2] x, float[4,2] u) => (float[8,8,2] o)",
              'n = ConstantOfShape(s) o = ScatterND<reduction="add">(n,x,u)', "int64[3] s={8,8,2}"),
        [
            model("(int64[4,2] x, float[4,2] u) => (float[4,8,2] o)",
                  "n = ConstantOfShape(s) c = Less(x,z) t = Add(x,e) d = Where(c,t,x) w = Sub(d,l) "
                  "g = GreaterOrEqual(w,z) b = Less(w,f) k = And(g,b) p = Where(k,w,z) v = Where(k,u,r) "
                  'o = ScatterND<reduction="add">(n,p,v)',
                  f"int64[3] s={{4,8,2}}, int64 l={{{4 * rank}}}, int64 f={{4}}, int64 e={{8}}, int64 z={{0}}, "
                  "float r={0}")
            for rank in (0, 1)
        ],
        {"outputs": {"o": {"split": ["tp", "", ""]}}},
    ),
    "a row maximum that may be no number": (
        model("(float[4,4] x, bool[4,1] f) => (float[4,1] o)",
              "i = Reciprocal(x) e = Exp(i) t = ReduceSum(e,a) w = Where(f,t,n) o = Log(w)",
              "int64[1] a={1}, float n={1}"),
        two("(float[4,4] x, bool[4,1] f) => (float[4,1] o)",
            "i = Reciprocal(x) e = Exp(i) t = ReduceSum(e,a) w = Where(f,t,n) l = Log(w) m = ReduceMax(i,a) "
            "p = Add(l,m) o = Sub(p,m)", "int64[1] a={1}, float n={1}"),
        {},
    ),
    "parts of sizes from an input": (
        model("(float[4,8] x, int64[2] n) => (float[4,4] o)", "o = Slice(x,z,f,a)", ROWS),
        two("(float[4,8] x, int64[2] n) => (float[4,4] o)", "l, h = Split<axis=1>(x,n) o = Identity(l)"),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("hole", HOLES)
def test_a_wrong_split_is_not_proven(hole: str, tmp_path: Path) -> None:
    source, ranks, relation = HOLES[hole]
    onnx.save(source, tmp_path / "source.onnx")
    paths = [tmp_path / f"rank_{index}.onnx" for index, _ in enumerate(ranks)]
    for path, rank in zip(paths, ranks):
        onnx.save(rank, path)
    known = {"format": "gopt-relation/1", "forward": True, "mesh": {"tp": 2}}
    assert not gopt.prove(tmp_path / "source.onnx", ranks=paths, relation=known | relation).proven
