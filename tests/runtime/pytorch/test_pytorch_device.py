"""Segments as traces: once for each shape, with the results of nodes that are computed in turn."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import make

from gopt.errors import RunError, UnsupportedError
from gopt.operators.table import OPERATORS
from gopt.runtime.executor import Executor

pytestmark = pytest.mark.torch
device = pytest.importorskip("gopt.runtime.pytorch.device")


def test_a_segment_is_traced_once_for_each_shape(tmp_path, monkeypatch):
    nodes = [
        helper.make_node("Shape", ["x"], ["size"]), helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("Add", ["x", "zeros"], ["sum"]), helper.make_node("Exp", ["sum"], ["y"]),
    ]  # fmt: skip
    graph = make(tmp_path, nodes, {"x": ("float32", ["rows", 2])}, {"y": ("float32", ["rows", 2])})
    traced, trace = [], device.make_fx
    monkeypatch.setattr(device, "make_fx", lambda *args, **named: traced.append(0) or trace(*args, **named))
    program = Executor(graph, device.TorchHost().sessions())
    for rows in (3, 4, 3, 4):
        x = np.random.default_rng(rows).standard_normal((rows, 2)).astype(np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], np.exp(x), rtol=1e-6)
    assert len(traced) == 2


@pytest.mark.parametrize("execution", ["NODES", "TRACE"])
def test_an_operator_without_a_deterministic_form_is_refused_by_name(execution, tmp_path, monkeypatch):
    put = replace(OPERATORS["Neg"], torch=lambda t, settings, x: t.zeros(2).put_(t.tensor([0, 0]), x))
    graph = make(
        tmp_path, [helper.make_node("Neg", ["x"], ["y"], name="last")], {"x": ("float32", [2])}, {"y": ("float32", [2])}
    )
    monkeypatch.setitem(OPERATORS, "Neg", put)
    program = Executor(graph, device.TorchHost("cpu", device.Execution[execution]).sessions())
    feeds = {"x": np.ones(2, np.float32)}
    assert program.run(feeds)["y"].shape == (2,)
    device.use_deterministic()
    try:
        with pytest.raises(UnsupportedError, match=r"no deterministic form of Neg \('last'\) on cpu"):
            program.run(feeds)
    finally:
        device.torch.use_deterministic_algorithms(False)


def test_an_error_of_pytorch_names_the_segment(tmp_path):
    graph = make(
        tmp_path, [helper.make_node("Add", ["x", "z"], ["y"])], {"x": ("float32", ["a"]), "z": ("float32", ["b"])},
        {"y": ("float32", ["a"])},
    )  # fmt: skip
    program = Executor(graph, device.TorchHost().sessions())
    with pytest.raises(RunError, match="PyTorch fails in segment of 1"):
        program.run({"x": np.zeros(3, np.float32), "z": np.zeros(2, np.float32)})
