"""Wrong ranks of a split computation that an adversary made by reading the laws: none is proven."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import gopt
from gopt.verification.proof.result import ProofVerdict, RankProof

ROWS = "int64[1] z={0}, int64[1] f={4}, int64[1] e={8}, int64[1] a={1}"
EIGHT = "int64[4,1] i={0,1,2,3}, int64[2] s={6,4}"


def model(signature: str, text: str, constants: str = "", call: str = "", said: Sequence[int] = ()) -> ModelProto:
    """A graph from text; ``call``: the reduction over tp that makes ``o`` of ``q``; ``said``: the shape of ``q`` in the
    file."""
    given = f"<{constants}>" if constants else ""
    made = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18, "gopt.comm" : 1]>\n g {signature} {given} {{ {text} }}'
    )
    if call:
        made.graph.node.append(helper.make_node("AllReduce", ["q"], ["o"], domain="gopt.comm", reduce=call, group="tp"))
    if said:
        made.graph.value_info.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, said))
    return made


def two(*arguments: str, **more: Any) -> list[ModelProto]:
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
    "twice the logarithm of a sum": (
        model("(float[4,8] x) => (float[4,8] o)", "h = LogSoftmax<axis=1>(x) o = LogSoftmax<axis=1>(h)"),
        two("(float[4,8] x) => (float[4,8] o)",
            "h = LogSoftmax<axis=1>(x) e = Exp(x) s = ReduceSum(e,a) l = Log(s) o = Sub(h,l)", "int64[1] a={1}"),
        {},
    ),
    "a second output with terms of a value": (
        model("(float[4,8] x, float[8,4] w) => (float[4,4] o)", "o = MatMul(x,w)"),
        two("(float[4,4] x, float[4,4] w) => (float[4,4] o, float[4,4] p)", "o = MatMul(x,w) p = Add(o,o)"),
        {"inputs": {"x": {"split": ["", "tp"]}, "w": {"split": ["tp", ""]}},
         "outputs": {"o": {"sum": "tp"}, "p": {"of": "o", "sum": "tp"}}},
    ),
    "a computed shape of which the file says another": (
        model("(float[4,8] x) => (float[8,4] o)", "o = Transpose<perm=[1,0]>(x)"),
        two("(float[4,8] x) => (float[8,4] o)", "s = Mul(m,n) q = Reshape(x,s) o = Transpose<perm=[1,0]>(q)",
            "int64[2] m={4,2}, int64[2] n={2,2}", said=[4, 8]),
        {},
    ),
    "a computed number of rows of which the file says another": (
        model("(float[4] x) => (float[2,4] o)", "o = Expand(x,s)", "int64[2] s={2,4}"),
        two("(float[4] x) => (float[2,4] o)", "b = Cast<to=9>(s) t = Cast<to=7>(b) o = Expand(x,t)",
            "int64[2] s={2,4}"),
        {},
    ),
    "a sum with none of what may be no number": (
        model("(float[4] x, float[4] y) => (float[4] o)", "s = Sin(x) c = Cos(y) o = Add(s,c)"),
        two("(float[4] x, float[4] y) => (float[4] o)", "i = Reciprocal(x) d = Sub(i,i) o = Add(d,y)"),
        {},
    ),
    "parts of sizes from an input": (
        model("(float[4,8] x, int64[2] n) => (float[4,4] o)", "o = Slice(x,z,f,a)", ROWS),
        two("(float[4,8] x, int64[2] n) => (float[4,4] o)", "l, h = Split<axis=1>(x,n) o = Identity(l)"),
        {},
    ),
}  # fmt: skip


RIGHT: dict[str, tuple[ModelProto, list[ModelProto], dict[str, Any]]] = {
    "a logarithm of a softmax twice": (
        model("(float[4,8] x) => (float[4,8] o)", "h = LogSoftmax<axis=1>(x) o = LogSoftmax<axis=1>(h)"),
        two("(float[4,8] x) => (float[4,8] o)", "o = LogSoftmax<axis=1>(x)"),
        {},
    ),
    "a rank without rows": (
        model("(float[5,4] x) => (float[5,4] o)", "o = Relu(x)"),
        [model(f"(float[{rows},4] x) => (float[{rows},4] o)", "o = Relu(x)") for rows in (5, 0)],
        {"ranks": [{"rank": rank, "inputs": {"x": {"box": [ends, [0, 4]]}}, "outputs": {"o": {"box": [ends, [0, 4]]}}}
                   for rank, ends in enumerate(([0, 5], [5, 5]))]},
    ),
}  # fmt: skip
UNDECIDED: dict[str, tuple[ModelProto, list[ModelProto], dict[str, Any]]] = {
    "equal elements of a constant, apart": (
        model("(float[4] x) => (float[4] o)", "o = Mul(x,c)", "float[4] c={0.1,0.1,0.3,0.4}"),
        [model("(float[2] x) => (float[2] o)", "o = Mul(x,c)", f"float[2] c={{{numbers}}}")
         for numbers in ("0.1,0.1", "0.3,0.4")],
        {"inputs": {"x": {"split": ["tp"]}}, "outputs": {"o": {"split": ["tp"]}}},
    ),
    "nothing but rounding": (
        model("(float[4,1] x) => (float[12,1] o)",
              "s = LogSoftmax<axis=-1>(x) t = Concat<axis=-2>(s,s,s) o = Mul(t,k)", "float k={1}"),
        two("(float[2,1] x) => (float[6,1] o)",
            "s = LogSoftmax<axis=-1>(x) t = Concat<axis=-2>(s,s,s) o = Mul(t,k)", "float k={1}"),
        {"inputs": {"x": {"split": ["tp", ""]}}, "outputs": {"o": {"split": ["tp", ""]}}},
    ),
}  # fmt: skip


def proof(source: ModelProto, ranks: list[ModelProto], relation: dict[str, Any], folder: Path) -> RankProof:
    onnx.save(source, folder / "source.onnx")
    paths = [folder / f"rank_{index}.onnx" for index, _ in enumerate(ranks)]
    for path, rank in zip(paths, ranks):
        onnx.save(rank, path)
    known = {"format": "gopt-relation/1", "forward": True, "mesh": {"tp": 2}}
    return gopt.prove(folder / "source.onnx", ranks=paths, relation=known | relation)


@pytest.mark.parametrize("hole", HOLES)
def test_a_wrong_split_is_not_proven(hole: str, tmp_path: Path) -> None:
    with suppress(gopt.InputError):
        assert not proof(*HOLES[hole], tmp_path).proven


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_split_is_proven(name: str, tmp_path: Path) -> None:
    assert proof(*RIGHT[name], tmp_path).proven


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_right_split_that_no_law_decides_is_not_called_different(name: str, tmp_path: Path) -> None:
    assert proof(*UNDECIDED[name], tmp_path).verdict is ProofVerdict.UNPROVEN
