"""Training graphs and checkpoints that belong together, and some that do not."""

from __future__ import annotations

import onnx
import pytest
from recordings import FOLDERS, RECORDED, copied, scrambled

from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.folder import read_artifacts
from gopt.importers.artifacts.join import join


def joined(folder):
    return join(read_artifacts(folder))


def test_roles_of_a_cnn():
    found = joined(FOLDERS / "cnn")
    assert [each.name for each in found.parameters][:2] == ["first.weight", "norm.weight"]
    assert [(each.name, each.made) for each in found.statistics] == [
        ("norm.running_mean", "/norm/BatchNormalization_output_1"),
        ("norm.running_var", "/norm/BatchNormalization_output_2"),
    ]
    assert found.frozen == () and found.batch == ("input", "labels") and len(found.outputs) == 1
    assert found.step == 0


def test_frozen_parameters_and_what_a_checkpoint_carries(tmp_path):
    found = joined(copied("mlp_frozen", tmp_path, RECORDED / "mlp_frozen.checkpoint"))
    assert {each.name for each in found.frozen} == {"0.weight", "0.bias"}
    assert len(found.parameters) == 4 and all(len(each.moments) == 2 for each in found.parameters)
    assert found.step == 3


def edited(name, place, change):
    """A copy of a folder whose training graph was changed."""
    folder = copied(name, place)
    model = onnx.load(folder / "training_model.onnx")
    change(model.graph)
    onnx.save(model, folder / "training_model.onnx")
    return folder


def adds(graph):
    return [node for node in graph.node if node.op_type == "InPlaceAccumulatorV2"]


def other_gradient(graph):
    adds(graph)[0].input[1] = "0.bias_grad"


def without_last(graph):
    graph.node.remove(adds(graph)[-1])
    graph.output.pop()


def no_buffer(graph):
    adds(graph)[0].input[0] = "output"


def other_type(graph):
    buffer = next(each for each in graph.input if each.name.startswith("0.weight_grad"))
    buffer.type.tensor_type.shape.dim[0].dim_value = 99


def other_buffer(name, *more):
    """Rename the buffer of the first accumulator, and of others."""

    def change(graph):
        for node, new in zip(adds(graph), (name, *more)):
            next(each for each in graph.input if each.name == node.input[0]).name = new
            node.input[0] = new

    return change


def no_loss(graph):
    del graph.output[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_gradient, "gradient .* has two accumulators"),
        (without_last, r"'4\.bias' is trained by the checkpoint, and the training graph has no gradient of it"),
        (no_buffer, "does not add to a buffer that is an input"),
        (other_buffer("output_grad.accumulation.buffer"), "belongs to 'output', which is not an input"),
        (other_buffer("2.bias_grad.accumulation.buffer"), r"'2\.bias' has two accumulators"),
        (other_type, r"buffer '0\.weight_.*' is float32\[99,8\], and its"),
        (no_loss, "no loss among its outputs"),
        (lambda graph: setattr(graph.input[2], "name", "9.weight"), "'0.weight', which is not an input"),
    ],
)
def test_names_that_do_not_match(change, message, tmp_path):
    with pytest.raises(InputError, match=message):
        joined(edited("mlp_adamw", tmp_path, change))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("mlp_frozen", "parameter '0.weight' of the training graph is not among those the checkpoint trains"),
        ("gpt", "parameter '0.weight'"),
    ],
)
def test_a_checkpoint_of_another_model(other, message, tmp_path):
    with pytest.raises(InputError, match=message):
        joined(copied("mlp_adamw", tmp_path, FOLDERS / other / "checkpoint"))


@pytest.mark.parametrize("name", ["mlp_adamw", "gpt", "cnn"])
def test_names_inside_the_graph_may_be_any(name, tmp_path):
    """Gradients that have each other's names belong to the parameters of their buffers."""
    before, found = joined(FOLDERS / name), joined(edited(name, tmp_path, scrambled))
    assert [each.name for each in found.parameters] == [each.name for each in before.parameters]
    assert found.batch == before.batch
    assert any(f"{each.name}_grad" != each.gradient and each.gradient.endswith("_grad") for each in found.parameters)


def test_a_buffer_with_another_name_is_of_the_parameter_of_its_type(tmp_path):
    """Both layers have a type of their own here, and what is left over is known by the others."""
    before = joined(FOLDERS / "mlp_adamw")
    found = joined(edited("mlp_adamw", tmp_path, other_buffer("a", "0.bias_grad.accumulation.buffer", "c", "d")))
    assert [each.name for each in found.parameters] == [each.name for each in before.parameters]


def test_a_buffer_that_may_be_of_several_parameters_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"'a' is not known: \d parameters without a buffer have its type") as caught:
        joined(edited("gpt", tmp_path, other_buffer(*"abcdefghijklmnop")))
    assert "as NAME_grad.accumulation.buffer" in caught.value.hints[0]


def test_a_checkpoint_of_other_shapes(tmp_path):
    def wider(graph):
        graph.input[2].type.tensor_type.shape.dim[0].dim_value = 32

    with pytest.raises(InputError, match=r"'0\.weight' is float32\[16,8\] in the checkpoint, and float32\[32,8\]"):
        joined(edited("mlp_adamw", tmp_path, wider))


def test_optimizer_states_of_fewer_parameters(tmp_path):
    parts = read_artifacts(copied("mlp_adamw", tmp_path, RECORDED / "mlp_adamw.checkpoint"))
    from dataclasses import replace

    (group,) = parts.checkpoint.groups
    fewer = replace(group, parameters=group.parameters[:-1])
    with pytest.raises(
        InputError, match=r"optimizer states of 5 parameters, and the training graph trains 6: '4\.weight'"
    ):
        join(replace(parts, checkpoint=replace(parts.checkpoint, groups=(fewer,))))
    with pytest.raises(UnsupportedError, match="2 groups of parameters"):
        join(replace(parts, checkpoint=replace(parts.checkpoint, groups=(group, group))))
    swapped = replace(group.parameters[0], states=group.parameters[1].states)
    with pytest.raises(InputError, match=r"'momentum0' of '0\.bias' is float32\[16,8\] in the checkpoint"):
        states = (swapped, *group.parameters[1:])
        join(replace(parts, checkpoint=replace(parts.checkpoint, groups=(replace(group, parameters=states),))))
