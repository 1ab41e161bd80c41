"""Gradients that travel in another type (``reduce_dtype``), and weights of halves: casts where they are said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES, calls, edit_manifest, edit_ranks
from onnx import ModelProto, NodeProto, helper
from plants import gradient_calls, replace
from products import spread

import gopt

FLOAT, FLOAT16, BFLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
FOLDERS = {
    "scattered": ("mlp_adamw", "dp=2,shard=2", {}),
    "copies": ("mlp_adamw", "dp=3", {"stage": 0}),
    "micro-steps": ("mlp_adamw", "dp=2,shard=2", {"accumulate": 2, "stage": 3}),
    "weights": ("emb_adamw", "dp=2,shard=2", {"accumulate": 2, "loss_reduction": "auto"}),
    "weights of halves": ("mlp_adamw_bf16", "dp=2,shard=2", {"loss_reduction": "auto"}),
    "parts": ("gpt_adamw", "dp=2,tp=2", {}),
}


def write(name: str, folder: Path, wire: str) -> Path:
    fixture, mesh, options = FOLDERS[name]
    source = FIXTURES / f"{fixture}.onnx"
    gopt.shard(source, mesh, passes={"shard": {"reduce_dtype": wire}}, **options).write(folder / "out")
    return folder / "out"


@pytest.mark.parametrize(("name", "wire"), spread(FOLDERS, ["float32", "float16", "bfloat16"], keep=2))
def test_gradients_that_travel_in_another_type_are_proven(name: str, wire: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path, wire)
    proof = gopt.prove(folder)
    assert proof.proven, proof.open()
    assert proof.roundings or wire == "float32"
    edit_manifest(folder, lambda record: record.pop("reduce_dtype"))
    exact = wire == "float32" or (name, wire) == ("weights of halves", "bfloat16")
    assert gopt.prove(folder).proven == exact, "without the key, casts are differences"


def through(model: ModelProto, name: str, *types: int) -> tuple[str, list[NodeProto]]:
    """A value behind casts to some types, and the casts."""
    nodes = []
    for index, type in enumerate(types):
        nodes.append(helper.make_node("Cast", [name], [f"{name}.cast{index}"], to=type))
        name = f"{name}.cast{index}"
    return name, nodes


def in_front(model: ModelProto, node: NodeProto, *types: int) -> None:
    """Casts of the first operand of a node."""
    node.input[0], nodes = through(model, node.input[0], *types)
    replace(model, node, [*nodes, node])


def wire_cast(model: ModelProto) -> NodeProto:
    sent = {name for node in gradient_calls(model) for name in node.input}
    return next(node for node in model.graph.node if node.op_type == "Cast" and node.output[0] in sent)


def behind(model: ModelProto) -> None:
    """The gradient of all batches is rounded to a third type."""
    widened = next(
        node
        for node in model.graph.node
        if node.op_type == "Cast" and node.input[0] in gradient_calls(model)[-1].output
    )
    reader = next(node for node in model.graph.node if widened.output[0] in node.input)
    name, nodes = through(model, widened.output[0], BFLOAT16, FLOAT)
    reader.input[list(reader.input).index(widened.output[0])] = name
    replace(model, reader, [*nodes, reader])


PLANTS: dict[str, tuple[str, Callable[[ModelProto], object]]] = {
    "another type first": ("scattered", lambda model: in_front(model, wire_cast(model), BFLOAT16, FLOAT)),
    "the same once more": ("scattered", lambda model: in_front(model, wire_cast(model), FLOAT16, FLOAT)),
    "behind the calls": ("scattered", behind),
    "new parameters": ("scattered", lambda model: in_front(model, calls(model, "AllGather")[0], FLOAT16, FLOAT)),
    "sums of other values": ("parts", lambda model: in_front(model, calls(model, "AllReduce")[0], FLOAT16, FLOAT)),
    "a weight": ("weights of halves", lambda model: in_front(
        model, next(node for node in model.graph.node if "share" in node.output[0]), FLOAT16, FLOAT)),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_a_cast_elsewhere_is_not_proven(plant: str, tmp_path: Path) -> None:
    name, edit = PLANTS[plant]
    folder = write(name, tmp_path, "float16")
    right = shutil.copytree(folder, tmp_path / "right")
    edit_ranks(folder, edit)
    assert gopt.prove(right).proven and not gopt.prove(folder).proven
