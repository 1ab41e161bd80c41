"""Delay compensation: the worked example, what is not late, types, and another engine that runs a server's file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from async_steps import scheduled, served
from helpers import run_graph
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from gopt.artifact.message_plan_check import wrong_messages
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, numpy_dtype
from gopt.parameter_server.delay import compensate
from gopt.records.placements import FULLY_REPLICATED
from gopt.runtime.device import Host
from gopt.runtime.parameter_server.key_state import KeyState
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.tuning.tuning import tuning_of


def seen(pushed: Array, now: Array, pulled: Array, strength: float, dtypes: tuple[str, str]) -> Array:
    """The gradient that an update reads."""
    own, held = (TensorType(each, (pushed.size,)) for each in dtypes)
    inputs = {"pushed": own, "now": held, "pulled": held}
    header = ModelProto(ir_version=10)
    header.opset_import.add(version=20)
    graph = Graph(
        "update", [Node("Identity", ["g"], ["seen"])], inputs, {"seen": own}, {}, {**inputs, "seen": own}, header
    )
    rewriter = GraphRewriter(graph, "test")
    compensate(rewriter, "g", "pushed", "now", "pulled", strength, FULLY_REPLICATED)
    rewriter.finish()
    return run_graph(graph, {"pushed": pushed, "now": now, "pulled": pulled})["seen"]


def test_the_worked_example() -> None:
    one = np.ones(1, np.float32)
    found = seen(one * np.float32(0.5), one, one * np.float32(0.8), 1.0, ("float32", "float32"))
    np.testing.assert_allclose(found, [0.55], rtol=1e-6)
    half = seen(one * np.float32(0.5), one, one * np.float32(0.8), 0.5, ("float32", "float32"))
    np.testing.assert_allclose(half, [0.525], rtol=1e-6)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float32"), ("float64", "float32")])
def test_what_is_not_late_stays_as_it_is(dtypes: tuple[str, str]) -> None:
    g = np.array([0.0, -0.0, 1e-30, 6e4, np.inf, -np.inf, np.nan], numpy_dtype(dtypes[0]))
    w = np.linspace(-1, 1, g.size).astype(numpy_dtype(dtypes[1]))
    assert seen(g, w, w.copy(), 3.0, dtypes).tobytes() == g.tobytes()


def test_halves_are_computed_wide_and_rounded_once() -> None:
    generator = np.random.default_rng(0)
    g = generator.standard_normal(200).astype(np.float16)
    w, pulled = generator.standard_normal((2, 200)).astype(np.float32)
    wide = g.astype(np.float32)
    wanted = (wide + (w - pulled) * wide * wide).astype(np.float16)
    assert seen(g, w, pulled, 1.0, ("float16", "float32")).tobytes() == wanted.tobytes()


def by_another_engine(path: Path) -> tuple[ReferenceEvaluator, dict[str, list[str]]]:
    """A server's file in onnx's reference evaluator, with what its messages bring as inputs; the names of these by
    operator."""
    model = onnx.load(str(path))
    messages = {node.op_type: list(node.output) for node in model.graph.node if node.domain == COMM}
    for node in [node for node in model.graph.node if node.domain == COMM]:
        model.graph.input.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in node.output)
        model.graph.node.remove(node)
    for each in [each for each in model.opset_import if each.domain == COMM]:
        model.opset_import.remove(each)
    inputs = {each.name for each in model.graph.input}
    for tensor in [each for each in model.graph.initializer if each.name in inputs]:
        model.graph.initializer.remove(tensor)
    return ReferenceEvaluator(model), messages


@pytest.mark.parametrize("minimum", [4, 1 << 20], ids=["pieces", "whole"])
def test_another_engine_trains_the_same_step_from_the_file(minimum: int, tmp_path: Path) -> None:
    """A server's file, the manifest and messages are all that it has: what was pushed, and what was pulled before."""
    folder, generator = tmp_path / "split", np.random.default_rng(1)
    split = served(scheduled(tmp_path / "m.onnx"), folder, compensation=2.0, servers=1, minimum=minimum)
    ((_, states, blocks),) = split.servers
    (start,) = split.values()
    keys = [KeyState(block, start, split.plan.count, [], Host(tuning_of(True)), SessionCache()) for block in blocks]
    engine, messages = by_another_engine(folder / "server_0000.onnx")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert messages["Aggregate"] == [key["gradient"] for key in manifest["parameter_server"]["keys"]]
    held, old = dict(start), dict(start)
    pushes = [{key.block.pushed: generator.normal(size=key.type.dims).astype("f4") for key in keys} for _ in range(3)]
    for number, pushed in enumerate(pushes):  # trainer 0 pulls once, and is later each time
        if not number:
            for key in keys:
                key.pull(0)
        for key in keys:
            key.push(0, pushed[key.block.pushed], 1)
        pulled = {
            name: old[key.block.entry.inputs[0]].reshape(key.type.dims)
            for name, key in zip(messages["Pulled"], keys, strict=True)
        }
        made = engine.run(list(states.values()), {**held, **pushed, **pulled, "gopt.round": np.array(number)})
        held = dict(zip(states, made, strict=True))
    for key in keys:
        for name, value in key.states.items():
            np.testing.assert_allclose(value, held[name], rtol=1e-5, atol=1e-7, err_msg=name)
        moved = np.abs(key.value - old[key.block.entry.inputs[0]]).max()
        assert moved > 1e-3, "the parameter that was pulled is another by now"


def test_a_file_that_compensates_nothing_is_not_that_of_the_manifest(tmp_path: Path) -> None:
    split = served(scheduled(tmp_path / "m.onnx"), tmp_path / "split", compensation=2.0, servers=1)
    ((graph, _, _),) = split.servers
    assert wrong_messages(split.plan, 0, {"step": graph}) is None
    graph.nodes = [node for node in graph.nodes if node.op_type != "Pulled"]
    wrong = wrong_messages(split.plan, 0, {"step": graph})
    assert wrong is not None and "Pulled of bucket 0" in wrong[1]
