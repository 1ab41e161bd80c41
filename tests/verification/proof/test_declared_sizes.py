"""Sizes that a file declares, and that no memory has: the proof allocates nothing by them."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from helpers import FIXTURES

import gopt
from gopt.ir.types import TensorType
from gopt.operators.dims.windows import Sliding
from gopt.records.mesh import Mesh
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import STATE
from gopt.verification.proof.place_laws import Places
from gopt.verification.proof.samples import SampledLeaves

HUGE = 1 << 40
MODEL = """<ir_version: 10, opset_import: ["": 20]>
g (float[4] x) => (float[4] y)
<int64 zero = {{0}}, int64 one = {{1}}, int64 most = {{{most}}}, int64[1] sizes = {{{most}}}, int64[1,1] row = {{3}},
 float[1] added = {{2}}, int64[1] none = {{0}}>
{{
  {node}
  big = Cast<to: int = 1>(made)
  largest = ReduceMax<keepdims: int = 0>(big, none)
  y = Add(x, largest)
}}"""
NODES = {
    "numbers in a row": "made = Range(zero, most, one)",
    "one number": "made = ConstantOfShape(sizes)",
    "a row in zeros": "zeros = ConstantOfShape(sizes) made = ScatterND(zeros, row, added)",
}


@pytest.mark.parametrize("name", NODES)
def test_a_constant_of_any_size_is_proven(name, tmp_path):
    model = onnx.parser.parse_model(MODEL.format(most=HUGE, node=NODES[name]))
    onnx.save(model, tmp_path / "step.onnx")
    ranks = [tmp_path / "step.onnx"]
    relation = {"format": "gopt-relation/1", "mesh": {"tp": 2}, "forward": True}
    assert gopt.prove(tmp_path / "step.onnx", ranks=ranks, relation=relation).proven


def test_numbers_of_a_counter_example_are_drawn_for_the_read_states_alone():
    training = gopt.load(FIXTURES / "mlp_sgd.onnx").training
    large, small = (state.tensor for state in training.states[:2])
    training.graph.initializers.pop(large, None)
    training.graph.types[large] = TensorType("float32", (1 << 25, 1 << 25))
    table = ConstantTable(Expressions({}))
    leaves = SampledLeaves(training, Mesh((("shard", 2),)), table, 0)
    shape = training.graph.types[small].shape
    value = leaves.leaf(table.expressions.all[table.expressions.leaf(STATE, small, shape)], {})
    assert value is not None and value.shape == shape


def test_places_of_a_large_plane_are_not_listed():
    slide = Sliding(kernel=3, stride=2, dilation=1, pad=1, behind=1, length=1 << 20, made=1 << 19)
    assert not Places((slide, slide)).few
    assert Places((replace(slide, length=64, made=32),) * 2).few
