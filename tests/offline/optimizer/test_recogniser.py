"""Optimizers are recognised once for all updates that are one function of their own values."""

from __future__ import annotations

import sys
import warnings

import pytest
from helpers import ROOT
from whole_gen.kinds import load_all
from whole_gen.writer import Writer

import gopt
from gopt.analysis.update_subgraphs import find_updates
from gopt.offline.inspect import inspect_model
from gopt.offline.optimizer.recogniser import Recogniser


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    """Sources of the benchmark's steps: a net of several layers with AdamW."""
    sys.path.append(str(ROOT / "benchmarks"))
    import graphs

    def make(**options):
        path = tmp_path_factory.mktemp("steps") / "step.onnx"
        path.write_bytes(graphs.build("mlp", 250, **options).SerializeToString())
        return gopt.load(path)

    return make


def rules(source, monkeypatch):
    """The rule of every parameter, and how many updates were tried."""
    tried = []
    original = Recogniser._tried
    monkeypatch.setattr(Recogniser, "_tried", lambda self, subgraph: tried.append(subgraph) or original(self, subgraph))
    recogniser = Recogniser(source.training)
    subgraphs = find_updates(source.training, whole_accumulators=False).subgraphs
    return {name: recogniser.rule(subgraph) for name, subgraph in subgraphs.items()}, len(tried)


@pytest.mark.parametrize("own_steps", [False, True])
def test_once_for_all(own_steps: bool, build, monkeypatch) -> None:
    """Counters of their own make updates of different classes, but not different functions."""
    found, tried = rules(build(own_steps=own_steps), monkeypatch)
    assert len(found) > 5 and tried == 1
    assert {(rule.name, rule.hyper["beta1"], rule.hyper["weight_decay"]) for rule in found.values()} == {
        ("AdamW", 0.9, 0.01)
    }


def test_other_constants_are_another_function(build, monkeypatch) -> None:
    """One epsilon is changed: that update alone is tried by itself, and said to be different."""
    source = build(own_steps=True)
    graph = source.training.graph
    root = next(node for node in graph.nodes if node.op_type == "Sqrt" and node.phase.value == "update")
    add = next(node for node in graph.nodes if root.outputs[0] in node.inputs)
    sibling = next(n for n in reversed(graph.nodes) if n.op_type == "Add" and n.phase.value == "update"
                   and n.inputs[-1] == add.inputs[-1] and n is not add)  # fmt: skip
    constants = {name: tensor.type for name, tensor in graph.initializers.items() if name not in graph.inputs}
    new = next(n for n, t in constants.items() if t.shape == () and t.dtype == "float32" and n != add.inputs[-1])
    sibling.inputs[-1] = new
    found, tried = rules(source, monkeypatch)
    assert tried == 2
    assert len({repr((rule.name, rule.hyper)) for rule in found.values()}) == 2


def test_a_rate_that_follows_an_own_counter_is_named_for_each(monkeypatch) -> None:
    """The scalar that a rule takes for its step size is that of the parameter, not of the one that was tried."""
    from onnx import parser

    one = """n{0} = Add(t{0}, one)  r{0} = Div(rate, n{0})  g{0}s = Mul(g{0}, r{0})  w{0}_new = Sub(w{0}, g{0}s)"""
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
        g (float[2,3] x, float[3,3] w0, float[3,3] w1, float t0, float t1)
        => (float loss, float[3,3] w0_new, float[3,3] w1_new, float n0, float n1)
        <float one = {{1}}, float rate = {{0.1}}> {{
        h = MatMul(x, w0)  a = Tanh(h)  y = MatMul(a, w1)  s = Mul(y, y)  loss = ReduceSum<keepdims = 0>(s)
        two = Constant<value = float {{2.0}}>()  dy = Mul(y, two)
        at = Transpose(a)  g1 = MatMul(at, dy)  w1t = Transpose(w1)  da = MatMul(dy, w1t)
        aa = Mul(a, a)  k = Sub(one, aa)  dh = Mul(da, k)  xt = Transpose(x)  g0 = MatMul(xt, dh)
        {one.format(0)}  {one.format(1)} }}"""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder, "m.onnx")
        path.write_bytes(parser.parse_model(text).SerializeToString())
        source = gopt.load(path)
        found, tried = rules(source, monkeypatch)
    assert tried == 1
    assert {name: rule.step_size for name, rule in found.items()} == {"w0": "r0", "w1": "r1"}
    assert inspect_model(source).optimizers[0].name == "SGD"


def test_a_factor_that_is_infinite_in_a_trial_gives_no_warning(tmp_path):
    """The weight of a group divides by a share that is zero where reduced values are: a terminal would show NumPy's
    warning."""
    w = Writer(219, 4, 1)
    load_all()["worst_group"](w)
    path = tmp_path / "step.onnx"
    path.write_bytes(w.model().SerializeToString())
    source = gopt.load(path)
    with warnings.catch_warnings(action="error"):
        assert [entry.name for entry in inspect_model(source).optimizers]
