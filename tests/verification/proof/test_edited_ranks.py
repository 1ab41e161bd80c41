"""Faults that random edits of rank files found, one test each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES, edit_file, edit_rank, edit_ranks
from mesh_gen.make import Recipe, make
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, helper

import gopt
from gopt.errors import InputError
from gopt.verification.certificate.check import check
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import UnknownSize
from gopt.verification.proof.result import ProofVerdict, RankProof

HEADER = '<ir_version: 8, opset_import: ["" : 20, "gopt.comm" : 1]>'


ROWS = {"x": {"split": ["tp", ""]}}
COLUMNS = {"x": {"split": ["", "tp"]}}


def proven(
    folder: Path, source: str, ranks: Sequence[str], inputs: Mapping[str, object], of_last: Mapping[str, object] = {}
) -> RankProof:
    """Ranks of a forward model, along tp; ``of_last``: other inputs of the last rank."""
    paths = [folder / f"{name}.onnx" for name in ("source", *range(len(ranks)))]
    for path, text in zip(paths, (source, *ranks)):
        onnx.save(onnx.parser.parse_model(f"{HEADER}\n{text}"), path)
    relation = {"format": "gopt-relation/1", "forward": True, "mesh": {"tp": len(ranks)}, "inputs": inputs}
    relation["ranks"] = [{"rank": len(ranks) - 1, "inputs": of_last}]
    return gopt.prove(paths[0], ranks=paths[1:], relation=relation)


def test_a_part_of_copies_is_not_looked_for_around_itself_again(tmp_path):
    """A part of copies in a row is a part of each copy, which is around the copies: without an end."""
    outputs = "(float[12,12] y, float[4,5] p, float[4,1] q)"
    source = f"""model (float[4,6] x) => {outputs} <int64[2] times = {{3, 2}}, int64[2] sizes = {{5, 1}}> {{
        s = Softmax<axis=1>(x)  w = Tile(s, times)  y = LogSoftmax<axis=0>(w)  p, q = Split<axis=1>(s, sizes) }}"""

    def rank(times: str, rows: str, both: str) -> str:
        stored = "".join(f", int64[2] t{at} = {{{more}}}" for at, more in enumerate((times, rows, both)))
        return f"""model (float[2,6] x, float[4,3] z) => {outputs}
            <int64[2] t = {{3, 2}}{stored}, int64[2] n = {{5, 1}}> {{
            a = Softmax<axis=1>(z)  b = Softmax<axis=1>(x)
            c = gopt.comm.AllGather<axis=0, group="tp", sizes=[2,2]>(b)  d = Tile(c, t)
            e = gopt.comm.AllGather<axis=0, group="tp", sizes=[2,2]>(b)
            f = Tile(e, t0)  g = Tile(b, t1)  h = Tile(c, t)
            i = Tile(e, t2)  y = LogSoftmax<axis=0>(h)  p, q = Split<axis=1>(e, n) }}"""

    ranks = [rank("3, 2", "3, 2", "3, 2"), rank("1, 2", "5, 2", "5, 1")]
    proof = proven(tmp_path, source, ranks, {**ROWS, "z": {"of": "x", "split": ["", "tp"]}})
    assert proof.verdict is not ProofVerdict.DIFFERENT


def test_some_terms_of_a_sum_over_copies(tmp_path):
    """The source tiles what it sums: some terms of the tiled value are some of the value itself."""
    source = """model (float[4,6] x) => (float[4] y, float[4,12] w) <int64[2] times = {1, 2}> {
        y = Einsum<equation="ij,ij->i">(x, x)  w = Tile(x, times) }"""
    rank = """model (float[4,2] x) => (float[4] y, float[4,12] w) <int64[2] times = {1, 2}> {
        a = gopt.comm.AllGather<axis=1, group="tp", sizes=[2,2,2]>(x)  w = Tile(a, times)
        b = Einsum<equation="ij,ij->i">(x, x)  y = gopt.comm.AllReduce<group="tp">(b) }"""
    assert proven(tmp_path, source, [rank] * 3, COLUMNS).proven


def test_ranges_of_a_value_of_unknown_size_are_not_nothing():
    expressions = Expressions({})
    unknown = expressions.leaf("x", (), None)
    viewed = expressions.view(unknown, (4, 1))
    part = expressions.flat(expressions.cut(viewed, 1, 3))
    assert expressions.shape(part) == (2,) and expressions.uniform(part) is None
    with pytest.raises(UnknownSize):
        expressions.pieces(unknown)


def test_the_result_of_a_call_has_the_shape_that_the_file_says(tmp_path):
    step = make(Recipe(5020, (6, 4, 4, 4), "floats", ("dense",), "pooled", "sgd"))
    (tmp_path / "step.onnx").write_bytes(step.model.SerializeToString())
    gopt.shard(tmp_path / "step.onnx", "sp=2").write(tmp_path / "ranks")

    def edit(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if "loss" in node.output)
        (own,) = [each for each in model.graph.node if node.input[0] in each.output]
        (keeps,) = [each for each in own.attribute if each.name == "keepdims"]
        keeps.i = 1
        for each in model.graph.value_info:
            if each.name in own.output:
                each.type.tensor_type.shape.dim.extend([TensorShapeProto.Dimension(dim_value=1)] * 2)

    edit_ranks(tmp_path / "ranks", edit)
    with pytest.raises(InputError):
        gopt.prove(tmp_path / "ranks")


def test_rows_of_another_width_are_not_merged(tmp_path):
    source = gopt.load(FIXTURES / "sparse/dlrm_adagrad.onnx")
    gopt.split(source, gopt.SplitOptions(trainers=1, servers=1)).write(tmp_path / "split")

    def edit(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "AggregateRows")
        next(each for each in node.attribute if each.name == "width").i -= 1
        for info in [info for info in model.graph.value_info if info.name in node.output]:
            model.graph.value_info.remove(info)

    edit_file(tmp_path / "split" / "server_0000.onnx", edit)
    assert not gopt.prove(tmp_path / "split").proven


def test_rows_are_written_in_their_shape_alone(tmp_path):
    """No runtime takes rows of another shape."""
    zeros = ", ".join("0" * 12)
    text = f"""model (float[2,4,3] x) => (float[4,3] y)
        <float[4,3] zeros = {{{zeros}}}, int64[4,1] rows = {{3, 2, 1, 0}}, int64[1] axis = {{0}}> {{
        z = ReduceSum<keepdims=KEEPS>(x, axis)  y = ScatterND<reduction="add">(zeros, rows, z) }}"""
    source, rank = (text.replace("KEEPS", str(keep)) for keep in (0, 1))
    assert proven(tmp_path, source, [source] * 2, {}).proven
    with pytest.raises(InputError, match="ScatterND 'y' does not fit its operands"):
        proven(tmp_path, source, [rank] * 2, {})


def retyped(model: ModelProto, *to: int) -> None:
    """Cast a constant number of the step on its way."""
    at, node = next((at, n) for at, n in enumerate(model.graph.node) if n.op_type == "Cast" and n.attribute[0].i == 1)
    (name,) = node.output
    steps = [NodeProto.FromString(node.SerializeToString())]
    steps[0].output[:] = [f"{name}.0"]
    for number, dtype in enumerate(to):
        result = name if number == len(to) - 1 else f"{name}.{number + 1}"
        steps.append(helper.make_node("Cast", [f"{name}.{number}"], [result], to=dtype))
    nodes = [*model.graph.node[:at], *steps, *model.graph.node[at + 1 :]]
    kept = [NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def test_the_checker_rounds_a_one(tmp_path):
    gopt.shard(FIXTURES / "optim/muon.onnx", "tp=2").write(tmp_path / "ranks")
    edit_rank(tmp_path / "ranks", 0, lambda model: retyped(model, TensorProto.BFLOAT16, TensorProto.FLOAT))
    assert gopt.prove(tmp_path / "ranks", certificate=tmp_path / "certificate").proven
    assert check(tmp_path / "ranks", (tmp_path / "certificate").read_text()).fault is None


NO_NUMBERS = {
    "a sum over a dimension that is named twice": (
        "c = ReduceMax(b, last)  s = Mul(c, many)  y = Add(x, s)",
        "c = ReduceMax(b, last)  e = Expand(c, sizes)  s = ReduceSum(e, twice)  y = Add(x, s)",
    ),
    "a rest of a division by zero": ("y = Mul(x, zero)", "r = Mod<fmod=1>(x, x)  y = Mul(r, zero)"),
    "the largest of a row with logarithms": (
        "e = Exp(x)  s = ReduceSum(e, last)  y = Log(s)",
        """e = Exp(x)  s = ReduceSum(e, last)  g = Log(s)  l = Log(b)  r = Add(x, l)  m = ReduceMax(r, last)
           z = Sub(m, m)  y = Add(g, z)""",
    ),
    "a softmax less the largest of another row": (
        "y = Softmax(x)",
        """l = Log(b)  r = Add(x, l)  m = ReduceMax(r, last)  d = Sub(x, m)  e = Exp(d)  s = ReduceSum(e, last)
           y = Div(e, s)""",
    ),
}  # fmt: skip
"""What ranks compute has no numbers, or does not run, where the source has some."""


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_has_no_numbers_is_not_proven(name, tmp_path):
    head = """model (float[4,6] x, float[4,6] b) => (float[N,M] y)
        <int64[1] last = {1}, int64[2] twice = {1, -1}, int64[2] sizes = {4, 6}, float zero = {0}, float many = {36}>"""
    source, rank = (f"{head} {{ {text} }}" for text in NO_NUMBERS[name])
    assert proven(tmp_path, source, [source] * 2, {}).proven
    assert not proven(tmp_path, source, [rank] * 2, {}).proven


BEYOND = {
    "Gather": "y = Gather<axis=0>(x, row)", "Gather of zeros": "g = Gather<axis=1>(x, row)  y = Mul(g, zero)",
    "GatherElements": "y = GatherElements<axis=-1>(x, element)", "GatherND": "y = GatherND(x, pair)",
    "ScatterND": """y = ScatterND<reduction="add">(x, row, zeros)""",
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("place", (-7, 6))
def test_an_index_beyond_the_elements_is_refused(name, place, tmp_path):
    """No runtime takes such a node, also where nothing follows from its result."""
    text = f"""model (float[4,6] x, float[1,6] zeros) => (float[N,M] y) <int64[1,1] row = {{PLACE}}, float zero = {{0}},
        int64[1,1] element = {{PLACE}}, int64[1,1,2] pair = {{0, PLACE}}> {{ {BEYOND[name]} }}"""
    text = text.replace(
        "float[N,M]", "float[N,M,K]" if name.startswith("Gather ") or name == "Gather" else "float[N,M]"
    )
    source, rank = text.replace("PLACE", "1"), text.replace("PLACE", str(place))
    assert proven(tmp_path, source, [source] * 2, {}).proven
    with pytest.raises(InputError, match="does not fit its operands: an index is beyond"):
        proven(tmp_path, source, [rank] * 2, {})


HEAD = (
    "model (float[4,{0}] x, float[{0},3] w, float[3] b) => (float[4,3] y) <int64[1] last = {{1}}, float zero = {{0}}>"
)
NOTHING = {"x": {"box": [[0, 4], [0, 0]]}, "w": {"box": [[0, 0], [0, 3]]}}


@pytest.mark.parametrize(
    ("of_source", "of_last"),
    [
        ("z = Gemm(x, w, b)", "z = Gemm(x, w, b)"),
        *(("p = MatMul(x, w) z = Mul(p, zero)", f"m = {op}(x, last) q = MatMul(x, w) p = Mul(m, zero) z = Add(p, q)")
          for op in ("ReduceMean", "ReduceMax")),
    ],
)  # fmt: skip
def test_a_part_without_elements_adds_what_the_operator_says(of_source, of_last, tmp_path):
    """A product of nothing is what is added to it, and a mean of nothing is no number."""
    call = 'y = gopt.comm.AllReduce<group="tp">(z)'
    source = f"{HEAD.format(6)} {{ {of_source.replace('z =', 'y =')} }}"
    right, wrong = f"{HEAD.format(6)} {{ {of_source} {call} }}", f"{HEAD.format(0)} {{ {of_last} {call} }}"
    plain = f"{HEAD.format(0)} {{ z = MatMul(x, w) {call} }}"
    assert proven(tmp_path, source, [right, plain], {}, NOTHING).proven
    assert not proven(tmp_path, source, [right, wrong], {}, NOTHING).proven
