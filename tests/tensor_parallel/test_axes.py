"""What each axis of a mesh splits."""

from __future__ import annotations

import onnx
import pytest
from helpers import FIXTURES, source

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.records.mesh import Mesh
from gopt.records.placements import Shard
from gopt.tensor_parallel.axes import AxisRequest, AxisSplit, split_axes
from gopt.tensor_parallel.patterns import FED, Pattern


def asked(name: str, mesh: str, parameters: str = "", inputs: str = "", **options) -> dict[str, AxisSplit]:
    request = AxisRequest(Pattern.parse(parameters), Pattern.parse(inputs, FED), **options)
    return {each.axis: each for each in split_axes(source(name).training, Mesh.parse(mesh), request, print)}


def test_tokens_of_all_inputs_that_have_them():
    split = asked("gpt_adamw", "cp=3")["cp"]
    assert split.fed == {"x": Shard(1, (3, 3, 2)), "y": Shard(1, (3, 3, 2))}
    assert not split.states and not split.choices


def test_tokens_of_an_axis_lie_inside_those_of_the_axes_in_front():
    found = asked("gpt_adamw", "sp=2,cp=2,tp=2", sequence=True)
    assert found["sp"].fed["x"] == Shard(1, (4, 4))
    assert found["cp"].fed["x"] == Shard(1, (2, 2), runs=2)
    assert found["tp"].tokens.sizes == (1, 1) and found["tp"].tokens.runs == 4


def test_what_the_user_says_of_inputs():
    assert asked("gpt_adamw", "cp=2", inputs="y:whole@cp")["cp"].fed == {"x": Shard(1, (4, 4))}
    assert asked("mlp_sgd", "cp=2", inputs="x:dim0@cp")["cp"].fed == {"x": Shard(0, (4, 4))}


def test_a_dimension_that_two_axes_split():
    found = asked("mlp_sgd", "tp=2,cp=2", "fc1.weight:dim0;fc1.weight:dim0@cp", "x:dim0@cp")
    assert found["tp"].states["fc1.weight"] == Shard(0, (32, 32))
    assert found["cp"].states["fc1.weight"] == Shard(0, (16, 16), runs=2)


def test_a_dimension_that_does_not_share_out_over_two_axes():
    with pytest.raises(
        OptionError, match=r"dimension 0 of 'fc1.weight' cannot be divided evenly over 3 ranks along tp"
    ):
        asked("mlp_sgd", "tp=3,cp=2", "fc1.weight:dim0;fc1.weight:dim0@cp", "x:dim0@cp")


@pytest.mark.parametrize(
    ("name", "mesh", "error", "words"),
    [
        ("mlp_sgd", "cp=2", UnsupportedError, "has tokens to divide among the 2 ranks along cp"),
        ("gpt_adamw", "cp=16", UnsupportedError, "the 8 tokens of 'x' do not cut into 16 parts along cp"),
        ("gpt_adamw", "cp=3,sp=2", UnsupportedError, "8 tokens of 'x' do not cut into 6 equal parts along cp and sp"),
        ("emb_adamw", "cp=2,sp=2", UnsupportedError, "6 tokens of 'x' do not cut into 4 equal parts along cp and sp"),
        ("emb_adamw", "sp=8", UnsupportedError, "the 6 tokens of 'x' do not cut into 8 parts along sp"),
        ("mlp_sgd", "w=2", UnsupportedError, "has rows or columns of an image"),
        ("gpt_adamw", "ep=2", UnsupportedError, "no weights of experts are found"),
    ],
)
def test_nothing_to_split(name, mesh, error, words):
    with pytest.raises(error, match=words):
        asked(name, mesh)


def test_nothing_to_split_in_a_batch_of_an_open_size(tmp_path):
    model = onnx.load(FIXTURES / "gpt_adamw.onnx")
    for info in model.graph.input:
        if info.name in "xy":
            info.type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError) as caught:
        gopt.shard(gopt.load(tmp_path / "step.onnx"), "sp=2")
    assert "make_dynamic_shape_fixed --dim_param n --dim_value" in caught.value.hints[0]


@pytest.mark.parametrize(("parameters", "inputs"), [("fc1.weight:column@cp", ""), ("", "x:dim0@w")])
def test_a_pattern_of_an_axis_that_is_not_there(parameters, inputs):
    with pytest.raises(OptionError, match="is of an axis that the mesh tp=2 does not have"):
        asked("mlp_sgd", "tp=2", parameters, inputs)


def test_images_have_height_and_width():
    found = asked("cnn_sgd", "h=2,w=2")
    x = source("cnn_sgd").training.graph.types["x"].dims
    assert found["h"].fed == {"x": Shard(2, (x[2] // 2,) * 2)}
    assert found["w"].fed == {"x": Shard(3, (x[3] // 2,) * 2)}
