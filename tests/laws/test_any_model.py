"""Any valid ONNX file is described, by text, JSON and canonical text: forwards of the fixtures, mutated."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import ModelProto, TensorProto, helper, numpy_helper
from products import spread

SEEDS = range(int(os.environ.get("GOPT_DRAWN", "2")))
CASES = sorted(path.stem for path in (FIXTURES / "cases/inspect").glob("*.onnx"))
FORWARDS = {"mlp_sgd": "addmm_1", "emb_adamw": "addmm_1", "cnn_sgd": "addmm", "mlp_rmsprop": "loss"}
"""Fixture -> the value that its forward ends with."""


def forward(name: str) -> ModelProto:
    """The part of a fixture that makes one of its values; parameters become initializers that are no inputs."""
    model = onnx.load(FIXTURES / f"{name}.onnx")
    graph, end = model.graph, FORWARDS[name]
    kinds = {each.name: each for each in (*graph.value_info, *graph.output)}
    needed, kept = {end}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    body = helper.make_graph(
        kept[::-1], "forward", [each for each in graph.input if each.name in needed and not _state(each.name)],
        [kinds[end]], [each for each in graph.initializer if each.name in needed],
    )  # fmt: skip
    stored = {each.name for each in body.initializer}
    body.input.extend(each for each in graph.input if each.name in needed and _state(each.name) - stored)
    return helper.make_model(body, opset_imports=list(model.opset_import), ir_version=10)


def _state(name: str) -> set[str]:
    return {name} if name not in ("x", "y", "lr") else set()


def nothing_stored(model: ModelProto, dice: random.Random) -> None:
    for each in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)))
    del model.graph.initializer[:]


def constants(model: ModelProto, dice: random.Random) -> None:
    nodes = [helper.make_node("Constant", [], [each.name], value=each) for each in model.graph.initializer]
    nodes += list(model.graph.node)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)


def passed_through(model: ModelProto, dice: random.Random) -> None:
    chosen = dice.choice(model.graph.input)
    made = model.graph.output.add(name=f"{chosen.name}_{len(model.graph.output)}", type=chosen.type)
    model.graph.node.append(helper.make_node("Identity", [chosen.name], [made.name]))


def counted(model: ModelProto, dice: random.Random) -> None:
    """A whole number that a call hands to the next."""
    kind = dice.choice([TensorProto.INT64, TensorProto.FLOAT])
    shape = dice.choice([[], [3], ["N"]])
    model.graph.input.append(helper.make_tensor_value_info("place", kind, shape))
    model.graph.output.append(helper.make_tensor_value_info("place_out", kind, shape))
    one = numpy_helper.from_array(helper.tensor_dtype_to_np_dtype(kind).type(1), "one_more")
    model.graph.initializer.append(one)
    model.graph.node.append(helper.make_node("Add", ["place", "one_more"], ["place_out"]))


def in_a_function(model: ModelProto, dice: random.Random) -> None:
    kind = model.graph.output[0]
    inside = helper.make_node("Neg", ["a"], ["b"])
    own = helper.make_function("own", "Flip", ["a"], ["b"], [inside], list(model.opset_import))
    model.functions.append(own)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node.append(helper.make_node("Flip", [kind.name], ["flipped"], domain="own"))
    model.graph.output.add(name="flipped", type=kind.type)


def in_a_sequence(model: ModelProto, dice: random.Random) -> None:
    tensor = model.graph.output[0].type
    kind = helper.make_sequence_type_proto(tensor)
    if dice.random() < 0.5:
        model.graph.node.append(helper.make_node("SequenceConstruct", [model.graph.output[0].name], ["row"]))
        model.graph.output.add(name="row", type=kind)
    else:
        chosen = helper.make_optional_type_proto(kind) if dice.random() < 0.5 else kind
        model.graph.input.add(name="row", type=chosen)


def without_nodes(model: ModelProto, dice: random.Random) -> None:
    given = model.graph.input[0]
    del model.graph.node[:], model.graph.output[:], model.graph.initializer[:]
    model.graph.output.add(name=given.name, type=given.type)


def grown(model: ModelProto, dice: random.Random) -> None:
    """A constant of 2^40 elements in a few bytes, and one element of it."""
    shape = numpy_helper.from_array(np.array([1 << 20, 1 << 20]), "huge_shape")
    model.graph.initializer.append(shape)
    model.graph.node.append(helper.make_node("ConstantOfShape", ["huge_shape"], ["huge"]))
    model.graph.node.append(helper.make_node("ReduceMax", ["huge"], ["most"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("most", TensorProto.FLOAT, []))


def cached(model: ModelProto, dice: random.Random) -> None:
    """Rows of a cache are written by the batch, and the result reads it."""
    end = model.graph.output[0]
    shape = [each.dim_value for each in end.type.tensor_type.shape.dim]
    model.graph.input.append(helper.make_tensor_value_info("cache", TensorProto.FLOAT, shape))
    model.graph.output.append(helper.make_tensor_value_info("cache_out", TensorProto.FLOAT, shape))
    model.graph.output.append(helper.make_tensor_value_info("score", TensorProto.FLOAT, []))
    model.graph.node.append(helper.make_node("Add", ["cache", end.name], ["cache_out"]))
    model.graph.node.append(helper.make_node("ReduceMax", ["cache_out"], ["score"], keepdims=0))


MUTATIONS = [
    nothing_stored, constants, passed_through, counted, in_a_function, in_a_sequence, without_nodes, grown, cached,
]  # fmt: skip


def described(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the three forms of ``gopt inspect`` give, each with exit code 0."""
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 0, capsys.readouterr().err
    assert main(["inspect", str(path), "--text"]) == 0
    assert "gopt text 1\n" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


@pytest.mark.parametrize("case", CASES)
def test_files_that_were_refused_once(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = described(FIXTURES / "cases/inspect" / f"{case}.onnx", capsys)
    assert record["what"] == ("model" if "step" in case else "inference_model")


@pytest.mark.parametrize(
    ("seed", "change", "name"), spread(SEEDS, MUTATIONS, FORWARDS), ids=lambda each: getattr(each, "__name__", each)
)
def test_a_mutated_forward_is_described(seed, change, name, tmp_path, capsys) -> None:
    model, dice = forward(name), random.Random(seed)
    for each in (dice.choice(MUTATIONS[:4]), change) if seed else (change,):
        each(model, dice)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "m.onnx")
    record = described(tmp_path / "m.onnx", capsys)
    assert record["what"] == "inference_model"
    if change is in_a_function:
        assert record["functions"] == ["Flip"]
    if change is cached and FORWARDS[name] != "loss":  # scalars are paired where there is a loss alone
        assert record["carried"]["cache"] == "cache_out"


def test_a_step_whose_roles_are_open_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Which of its outputs replaces which of its inputs."""
    assert main(["inspect", str(FIXTURES / "optim" / "asgd.onnx")]) == 4
    assert "the data flow does not say" in capsys.readouterr().err
