"""Digests of a graph: neither names of inner values nor their order count, all that a node does counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Builder

from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.offline.goldens.digests import node_digests, phase_digests, scalar_uses, short_digest, values_digest


def model(path: Path, change: Callable[[onnx.ModelProto], None] = lambda _: None) -> Graph:
    b = Builder()
    w = b.state("w", np.array([[1.0, 2.0], [3.0, 4.0]], "f4"))
    left, right = b.op("Mul", w, b.const(0.5)), b.op("Softmax", w, axis=1)
    b.output("y", b.op("Sub", left, right), (2, 2))
    b.save(path)
    proto = onnx.load(path)
    change(proto)
    onnx.save(proto, path)
    return load(path)


def digest(graph: Graph) -> str:
    return short_digest(sorted(node_digests(graph)))


def swap(proto: onnx.ModelProto) -> None:
    """Other names of inner values, and another order of nodes."""
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"other_{name}" if name.startswith("v") else name for name in names]
    first, second, *rest = (onnx.NodeProto.FromString(node.SerializeToString()) for node in proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([second, first, *rest])


def axis(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Softmax").attribute[0].i = 0


def operands(proto: onnx.ModelProto) -> None:
    next(node for node in proto.graph.node if node.op_type == "Sub").input[:] = [
        *reversed(next(node for node in proto.graph.node if node.op_type == "Sub").input)
    ]


def constant(proto: onnx.ModelProto) -> None:
    held = next(each for each in proto.graph.initializer if each.name != "w")
    held.CopyFrom(onnx.numpy_helper.from_array(np.float32(0.25), held.name))


def value(proto: onnx.ModelProto) -> None:
    held = next(each for each in proto.graph.initializer if each.name == "w")
    held.CopyFrom(onnx.numpy_helper.from_array(np.zeros((2, 2), "f4"), "w"))


def test_names_and_order_do_not_count(tmp_path: Path) -> None:
    assert digest(model(tmp_path / "a.onnx")) == digest(model(tmp_path / "b.onnx", swap))


@pytest.mark.parametrize("change", [axis, operands, constant])
def test_what_a_node_does_counts(change: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    assert digest(model(tmp_path / "a.onnx")) != digest(model(tmp_path / "b.onnx", change))


def test_initial_values_have_a_digest_of_their_own(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a.onnx"), model(tmp_path / "b.onnx", value)
    assert digest(one) == digest(other) and values_digest(one) != values_digest(other)


def test_phases_and_constants(tmp_path: Path) -> None:
    graph = model(tmp_path / "a.onnx")
    phases = {id(node): "update" if node.op_type == "Sub" else "forward" for node in graph.nodes}
    assert {phase: count for phase, (count, _) in phase_digests(graph, phases).items()} == {"forward": 2, "update": 1}
    assert scalar_uses(graph, phases) == {("forward", "float32[] 0.5"): 1}
