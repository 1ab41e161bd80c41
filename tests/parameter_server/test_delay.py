"""Delay compensation: the worked example, what is not late, and types."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.parameter_server.delay import compensated
from gopt.runtime.reference_eval import run_graph
from gopt.runtime.session import Array


def block(gradient: str, parameter: str, size: int) -> Graph:
    """new = w - 0.1 g, g clipped to 0.54."""
    types = {"g": TensorType(gradient, (size,)), "w": TensorType(parameter, (size,))}
    header = ModelProto(ir_version=10)
    header.opset_import.add(version=20)
    nodes = [Node("Identity", ["g"], ["seen"])]
    types["seen"] = types["g"]
    return Graph("block", nodes, {"g": types["g"], "w": types["w"]}, {"seen": types["g"]}, {}, types, header)


def seen(g: Array, w: Array, backup: Array, strength: float, dtypes: tuple[str, str]) -> Array:
    graph, pushed, held = compensated(block(*dtypes, g.size), "g", "w", strength)
    assert held in graph.inputs and pushed in graph.inputs and "g" not in graph.inputs
    return run_graph(graph, {pushed: g, held: backup, "w": w})["seen"]


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
    w, backup = generator.standard_normal((2, 200)).astype(np.float32)
    wide = g.astype(np.float32)
    wanted = (wide + (w - backup) * wide * wide).astype(np.float16)
    assert seen(g, w, backup, 1.0, ("float16", "float32")).tobytes() == wanted.tobytes()
