"""Folders of artifacts as functional steps: on the stock runtime they give what the recordings hold."""

from __future__ import annotations

import json

import onnx
import pytest
from recordings import (
    FOLDERS,
    MORE,
    NAMES,
    RECORDED,
    STEPS,
    Running,
    copied,
    known_to_onnx,
    moments,
    moved,
    recorded,
    scrambled,
)

from gopt.errors import InputError, UnsupportedError
from gopt.importers.load import load_step


def step(folder):
    graph = load_step(folder)
    return graph, Running(graph, json.loads(graph.metadata["gopt.roles"]))


def compare(name, running, start, stop):
    """Losses, parameters and statistics after each step, in tolerances."""
    wanted = recorded(name)
    first = {key: value.astype("float64") for key, value in running.states.items()}
    worst, seen = 0.0, set()
    for place in range(start, stop):
        loss = running(wanted[f"input.{place}"], wanted[f"labels.{place}"])
        assert loss == pytest.approx(float(wanted[f"loss.{place}"]), rel=1e-5)
        for key, value in running.states.items():
            if f"{key}.{place}" in wanted:
                seen.add(key)
                worst = max(worst, moved(value, wanted[f"{key}.{place}"], first[key]))
    assert (
        seen == {key.removesuffix(f".{start}") for key in wanted if key.endswith(f".{start}")} & running.states.keys()
    )
    assert len(seen) >= 2
    return worst


@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_recording(name):
    """Losses, parameters, statistics and moments of three steps from the checkpoint as it was generated."""
    graph, running = step(FOLDERS / name)
    assert known_to_onnx(graph) == []
    first = {key: value.astype("float64") for key, value in running.states.items()}
    assert compare(name, running, 0, STEPS) <= 1
    held = moments(RECORDED / f"{name}.checkpoint")
    for key in running.states.keys() & held.keys():
        assert moved(running.states[key], held[key], first[key]) <= 1, key
    assert "step" not in running.states or running.states["step"].tolist() == [STEPS]


@pytest.mark.parametrize("name", ["mlp_clip", "tied", "gpt"])
def test_names_inside_the_graph_do_not_matter(name, tmp_path):
    """Gradients have one another's names: each parameter gets its own all the same."""
    _, running = step(edited(name, tmp_path, lambda model: scrambled(model.graph)))
    assert compare(name, running, 0, STEPS) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_step_goes_on_from_a_checkpoint_with_optimizer_states(name, tmp_path):
    _, running = step(copied(name, tmp_path, RECORDED / f"{name}.checkpoint"))
    assert "step" not in running.states or running.states["step"].tolist() == [STEPS]
    assert compare(name, running, STEPS, STEPS + MORE) <= 1


def edited(name, place, change):
    folder = copied(name, place)
    model = onnx.load(folder / "training_model.onnx")
    change(model)
    onnx.save(model, folder / "training_model.onnx")
    return folder


def unknown_operator(model):
    node = next(node for node in model.graph.node if node.op_type == "ReluGrad")
    node.op_type = "EluGrad"


def old(model):
    next(each for each in model.opset_import if each.domain == "").version = 12


def own_function(model):
    model.functions.add(name="F", domain="mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unknown_operator, "operator 'com.microsoft.EluGrad' of node '/3/Relu_Grad/ReluGrad_0' has no standard form"),
        (old, "the training graph is of operator set 12"),
        (own_function, "the training graph has functions of its own"),
    ],
)
def test_what_has_no_standard_form_is_refused(change, message, tmp_path):
    with pytest.raises(UnsupportedError, match=message):
        load_step(edited("mlp_adamw", tmp_path, change))


def test_what_is_added_to_a_buffer_has_the_type_of_the_parameter(tmp_path):
    def other(model):
        next(node for node in model.graph.node if node.op_type == "InPlaceAccumulatorV2").input[1] = "output"

    with pytest.raises(InputError, match=r"training_model.onnx: the gradient 'output' of '0.weight' is float32\[6,4\]"):
        load_step(edited("mlp_adamw", tmp_path, other))


def test_operands_that_do_not_fit_are_refused(tmp_path):
    def fewer(model):
        node = next(node for node in model.graph.node if node.op_type == "ReluGrad")
        del node.input[1]

    with pytest.raises(InputError, match=r"ReluGrad .* has operands or attributes that do not fit"):
        load_step(edited("mlp_adamw", tmp_path, fewer))


def test_frozen_parameters_are_constants():
    graph = load_step(FOLDERS / "mlp_frozen")
    assert "0.weight" not in graph.inputs and graph.initializers["0.weight"].nbytes == 512
    assert list(graph.inputs)[:4] == ["input", "labels", "learning_rate", "step"]


def test_values_stay_in_the_checkpoint():
    graph = load_step(FOLDERS / "mlp_adamw")
    assert graph.initializers["0.weight"].path.endswith("/mlp_adamw/checkpoint")
    assert graph.initializers["0.weight.momentum0"].numpy().sum() == 0


def test_a_source_of_an_older_operator_set_is_raised():
    assert {each.version for each in load_step(FOLDERS / "gpt").header.opset_import} == {17}


def test_a_training_graph_that_cannot_run_is_refused(tmp_path):
    """The step passes the same checks as any model: here a value that nothing makes."""

    def undefined(model):
        model.graph.node[0].input[0] = "nothing"

    with pytest.raises(InputError, match="'nothing' is undefined"):
        load_step(edited("mlp_adamw", tmp_path, undefined))
