"""Derivatives of small models beside finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from node_models import info, session
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_scan

from gopt.artifact.serialize import model_bytes
from gopt.autodiff.backward import tidy
from gopt.autodiff.differentiate import differentiate
from gopt.ir.load import graph_of

Arrays = Mapping[str, np.ndarray]
Runner = Callable[[ModelProto, Arrays], dict[str, np.ndarray]]


class Scan(op_scan.Scan):
    """Scan with axes and directions, which onnx's evaluator lacks."""

    def __init__(self, node: NodeProto, run_params: dict[str, Any]) -> None:
        OpRun.__init__(self, node, run_params)
        self.input_names, self.output_names = self.body.input_names, self.body.output_names

    def _run(self, *args: np.ndarray, context: Any = None, bindings: Any = None, **given: Any) -> tuple[Any, ...]:
        count = len(args) - self.num_scan_inputs
        states, slices = list(args[:count]), []
        for place, value in enumerate(args[count:]):
            moved = np.moveaxis(value, _entry(self.scan_input_axes, place), 0)
            slices.append(moved[::-1] if _entry(self.scan_input_directions, place) else moved)
        made: list[list[np.ndarray]] = [[] for _ in self.output_names[count:]]
        for row in zip(*slices):
            feeds = {**(context or {}), **dict(zip(self.input_names, (*states, *row)))}
            results = self._run_body(feeds, bindings=bindings)
            states = list(results[:count])
            for rows, result in zip(made, results[count:]):
                rows.append(result)
        for place, rows in enumerate(made):
            ordered = rows[::-1] if _entry(self.scan_output_directions, place) else rows
            states.append(np.stack(ordered, _entry(self.scan_output_axes, place)))
        return self._check_and_fix_outputs(tuple(states))


Scan.op_domain = ""


def _entry(values: Sequence[int] | None, place: int) -> int:
    return values[place] if values is not None and place < len(values) else 0


def reference(model: ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    """The outputs by onnx's evaluator."""
    evaluator = ReferenceEvaluator(model, new_ops=[Scan])
    return dict(zip([each.name for each in model.graph.output], evaluator.run(None, dict(feeds))))


def runtime(model: ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    """The outputs by ONNX Runtime."""
    return dict(zip([each.name for each in model.graph.output], session(model).run(None, dict(feeds))))


def scalar_model(nodes: Sequence[NodeProto], inputs: Arrays, constants: Arrays, result: str, weights: np.ndarray,
                 opset: int) -> ModelProto:  # fmt: skip
    """The model ``loss`` = the sum of ``result`` times fixed ``weights``."""
    nodes = [
        *nodes,
        helper.make_node("Mul", [result, "loss.weights"], ["loss.terms"]),
        helper.make_node("ReduceSum", ["loss.terms"], ["loss"], keepdims=0),
    ]
    constants = {**constants, "loss.weights": weights}
    kind = helper.np_dtype_to_tensor_dtype(weights.dtype)
    graph = helper.make_graph(
        nodes, "scalar", [info(name, value) for name, value in inputs.items()],
        [helper.make_tensor_value_info("loss", kind, [])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def backward_of(model: ModelProto, by: Sequence[str]) -> tuple[ModelProto, dict[str, str]]:
    """The model with the derivatives of ``loss`` as outputs, as ``gopt derive`` writes them; and their names."""
    forward = {name for node in model.graph.node for name in node.output}
    made = differentiate(model, "loss", list(by))
    types = {each.name: each.type for each in made.model.graph.input}
    for name, gradient in made.gradients.items():
        output = made.model.graph.output.add()
        output.name = gradient
        output.type.CopyFrom(types[name])
    graph = graph_of(made.model)
    tidy(graph, made, forward)
    return ModelProto.FromString(model_bytes(graph, {}, "", {})), made.gradients


def worst_error(model: ModelProto, values: Arrays, by: Sequence[str], run: Runner, step: float) -> float:
    """The largest error, relative to 1 + the derivative, of derivatives along two directions of each of ``by``."""
    backward, names = backward_of(model, by)
    made = run(backward, values)
    random, worst = np.random.default_rng(1), 0.0
    for name in by:
        for _ in range(2):
            direction = random.standard_normal(values[name].shape).astype(values[name].dtype)
            ends = [
                float(run(model, {**values, name: np.asarray(values[name] + side * direction)})["loss"])
                for side in (step, -step)
            ]
            quotient = (ends[0] - ends[1]) / (2 * step)
            product = float((made[names[name]].astype(np.float64) * direction).sum()) if name in names else 0.0
            error = abs(product - quotient) / (1 + abs(quotient))
            worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst
