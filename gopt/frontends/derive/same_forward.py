"""Refuses a step with another forward than the model's: onnx-ad rewrites some operators. Finite differences cannot see
this, because the gradient fits the new forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gopt.errors import GoptError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS
from gopt.operators.kinds import RANDOM
from gopt.runtime.float64 import Float64Graph
from gopt.runtime.session import SessionCache
from gopt.runtime.widen import NARROW, widened
from gopt.text.sanitize import show
from gopt.verification.gradient_check.forward import Values
from gopt.verification.reference_graphs import refuse_call, subgraph

_TOLERANCE, _FLOOR = 1e-3, 1e-5
"""Share of the largest element by which a result may differ, in float32, and what is added to it."""


def check_same_forward(model: Graph, step: Graph, point: Mapping[str, np.ndarray]) -> None:
    """Raise UnsupportedError for an output that differs between both graphs. ``model``: the forward with the loss,
    before differentiation; ``point``: all inputs of both. A model with random nodes, or not runnable in float32, is not
    compared."""
    names = [name for name, kind in model.outputs.items() if name in step.outputs and kind.dtype in FLOATS]
    if any(node.is_in(RANDOM) for node in model.nodes):
        return
    try:
        results, second = _results(model, names, point), _results(step, names, point)
    except GoptError:
        return
    wrong = next((name for name in names if not near(results[name], second[name], _TOLERANCE, _FLOOR)), None)
    if wrong is not None:
        raise UnsupportedError(
            f"onnx-ad writes the model with other results: {show(wrong)} differs",
            "replace the operator in the model that onnx-ad expands, such as a recurrent layer",
        )


def _results(graph: Graph, names: list[str], point: Mapping[str, np.ndarray]) -> Values:
    stored = {
        name: value for name, value in graph.initializers.items() if name not in point or name not in graph.inputs
    }
    wide = widened(replace(graph, initializers=stored), "float32")
    program = Float64Graph(subgraph(wide, wide.nodes, names, ()), SessionCache())
    feeds = {
        name: np.asarray(point[name], np.float32) if graph.inputs[name].dtype in NARROW else np.asarray(point[name])
        for name in program.graph.inputs
        if name in point
    }
    return program.run(feeds, refuse_call)


def near(expected: np.ndarray, second: np.ndarray, tolerance: float, floor: float) -> bool:
    """Return whether numbers differ by at most a share of the largest expected number, in the same finite places."""
    one, two = np.asarray(expected, np.float64), np.asarray(second, np.float64)
    if one.shape != two.shape:
        return False
    finite = np.isfinite(one)
    most = np.abs(one[finite]).max(initial=0) * tolerance + floor
    return bool((finite == np.isfinite(two)).all() and (np.abs(one[finite] - two[finite]) <= most).all())
