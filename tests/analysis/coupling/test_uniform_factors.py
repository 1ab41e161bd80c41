"""Sizes of a batch that the file leaves open: read from its shape in several forms, in losses and in statistics."""

from __future__ import annotations

import onnx
import pytest
from helpers import FIXTURES

import gopt
from gopt.analysis.coupling import find_couplings
from gopt.analysis.coupling.step_couplings import analyse_couplings
from gopt.errors import UnsupportedError

PART = "n = ReduceProd<keepdims = 0>(t)"
SIZES = {
    "picked": f"s = Shape(d)\n p = Constant<value_ints = [0, 1]>()\n t = Gather(s, p)\n {PART}",
    "sliced": "s = Shape(d)\n a = Constant<value_ints = [0]>()\n b = Constant<value_ints = [2]>()\n"
    f" t = Slice(s, a, b)\n {PART}",
    "part": "s = Shape<start = 0, end = 1>(d)\n t = Squeeze(s)\n two = Constant<value_int = 2>()\n n = Mul(t, two)",
    "all": "n = Size(d)",
    "ones": "s = Shape(d)\n o = ConstantOfShape(s)\n i = Constant<value_float = 1.0>()\n c1 = Add(o, i)\n"
    " n = ReduceSum<keepdims = 0>(c1)",
    "places": "s = Size(d)\n a = Constant<value_int = 0>()\n b = Constant<value_int = 1>()\n t = Range(a, s, b)\n"
    " m1 = ReduceMax<keepdims = 0>(t)\n n = Add(m1, b)",
}
STEP = """<ir_version: 9, opset_import: ["" : 18]>
step (float[N,3] x, float[N,2] y, float[3,2] w, float seen, float[3] m)
=> (float loss, float[3,2] w_out, float seen_out, float[3] m_out) {
  c = Sub(x, m)
  z = MatMul(c, w)
  d = Sub(z, y)
  q = Mul(d, d)
  loss = ReduceMean<keepdims = 0>(q)
  SIZE
  f = Cast<to = 1>(n)
  k = Constant<value_float = 2.0>()
  r = Div(k, f)
  e = Mul(d, r)
  u = Transpose<perm = [1, 0]>(c)
  g = MatMul(u, e)
  rate = Constant<value_float = 0.1>()
  h = Mul(g, rate)
  w_out = Sub(w, h)
  rows = Shape<start = 0, end = 1>(x)
  row = Squeeze(rows)
  many = Cast<to = 1>(row)
  seen_out = Add(seen, many)
  axis = Constant<value_ints = [0]>()
  mean = ReduceMean<keepdims = 0>(x, axis)
  off = Sub(mean, m)
  part = Div(many, seen_out)
  by = Mul(off, part)
  m_out = Add(m, by)
}"""


def training_of(text: str, folder):
    model = onnx.parser.parse_model(text)
    onnx.save(model, str(folder / "step.onnx"))
    return gopt.load(folder / "step.onnx").training


@pytest.mark.parametrize("form", SIZES)
def test_a_mean_is_read_from_each_form_of_its_size(form, tmp_path):
    assert not find_couplings(training_of(STEP.replace("SIZE", SIZES[form]), tmp_path))


def test_ranks_add_up_open_sizes_and_average_what_they_divide(tmp_path):
    training = training_of(STEP.replace("SIZE", SIZES["all"]), tmp_path)
    found = analyse_couplings(training).statistics.known
    assert {name: each.rule for name, each in found.items()} == {"seen": "sum", "m": "sum+mean"}
    step = gopt.shard(gopt.load(tmp_path / "step.onnx"), 2)
    calls = [node for node in step.program.graph.nodes if node.op_type == "AllReduce" and node.inputs[0] != "g"]
    assert [node.attributes["reduce"] for node in calls] == ["sum", "mean"], "ranks may have batches of other sizes"


def test_a_sum_over_samples_stays_one(tmp_path):
    text = STEP.replace("SIZE", "n = Constant<value_int = 1>()").replace(
        "ReduceMean<keepdims = 0>(q)", "ReduceSum<keepdims = 0>(q)"
    )
    (fact,) = find_couplings(training_of(text, tmp_path))
    assert "are sums over the samples" in fact.what


def test_an_update_that_reads_a_mean_is_told_which_to_share(tmp_path):
    power = "pw = Mul(x, x)\n pm = ReduceMean<keepdims = 0>(pw)\n pr = Div(rate, pm)\n h = Mul(g, pr)"
    with pytest.raises(UnsupportedError) as refused:
        training_of(STEP.replace("SIZE", SIZES["all"]).replace("h = Mul(g, rate)", power), tmp_path)
    assert refused.value.hints[-1] == "let all ranks read the mean over all of them: --shared pm"


FUNCTIONS = {
    "Tanh(e0)": "is no multiple of the derivative", "Round(e0)": "is no multiple of the derivative",
    "Sign(e0)": "are sums over the samples", "Abs(e0)": "", "Relu(e0)": "",
    "Add(e0, still)": "",
}  # fmt: skip
"""A function of divided derivatives -> what is noted."""


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_a_divided_derivative_is_noted_where_it_is_no_multiple(function, tmp_path):
    """Samples whose derivatives are bent behind their division by the number of samples make no mean: no note told."""
    bent = STEP.replace(
        "e = Mul(d, r)",
        f"e0 = Mul(d, r)\n  nil = Constant<value_float = 0.0>()\n  still = Mul(d, nil)\n  e = {function}",
    ).replace("SIZE", SIZES["all"])
    found = [each.what for each in find_couplings(training_of(bent, tmp_path))]
    assert [FUNCTIONS[function] in what for what in found] == [True] * bool(FUNCTIONS[function])


def test_a_type_or_a_shape_alone_makes_no_function_of_the_samples():
    """A count that ranks share divides the adjoint, which is made like the loss: six sums were shared beside it."""
    source = gopt.load(FIXTURES / "cases" / "exports" / "mlp_adamw_noopt.onnx")
    assert gopt.shard(source, "dp=2", statistics="sync").program.synchronised.points == ("_to_copy",)
