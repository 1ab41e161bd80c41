"""A reader of ``training_info`` as ``onnx.proto`` describes it, by onnx and ONNX Runtime alone.

The training graph is the inference graph and the algorithm, list by list, one behind the other. A step runs it, and
then replaces all initializers that ``update_binding`` names at once. Initialization runs its graph, and sets what its
binding names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401 - bfloat16 of NumPy
import numpy as np
import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Values = dict[str, np.ndarray]


class Program:
    """A model that runs as it is written: no operator is merged with another, so that equal graphs give equal bits."""

    def __init__(self, model: ModelProto) -> None:
        self.outputs = [each.name for each in model.graph.output]
        self.inputs = [each.name for each in model.graph.input]
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        half = any(each.type.tensor_type.elem_type == TensorProto.BFLOAT16 for each in model.graph.value_info)
        half |= any(each.data_type == TensorProto.BFLOAT16 for each in model.graph.initializer)
        self.session: onnxruntime.InferenceSession | None = None
        self.reference: ReferenceEvaluator | None = None
        if half or any(_casts_to_bfloat16(node) for node in model.graph.node):  # it has no kernels for them
            self.reference = ReferenceEvaluator(model)
        else:
            self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, np.ndarray]) -> Values:
        given = {name: feeds[name] for name in self.inputs if name in feeds}  # others have a value of their own
        if self.session is not None:
            return dict(zip(self.outputs, self.session.run(self.outputs, given), strict=True))
        assert self.reference is not None
        with np.errstate(all="ignore"):
            return dict(zip(self.outputs, map(np.asarray, self.reference.run(None, given)), strict=True))


def _casts_to_bfloat16(node: onnx.NodeProto) -> bool:
    return any(each.name == "to" and each.i == TensorProto.BFLOAT16 for each in node.attribute)


def joined(model: ModelProto) -> ModelProto:
    """The training graph: the concatenation of both graphs' lists."""
    (info,) = model.training_info
    whole = ModelProto()
    whole.CopyFrom(model)
    del whole.training_info[:]
    for field in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
        getattr(whole.graph, field).extend(getattr(info.algorithm, field))
    return whole


class StandardTrainer:
    """Trains a model; ``values``: every initializer that is updated, as it is now."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        (info,) = self.model.training_info
        self.updates = {each.key: each.value for each in info.update_binding}
        assert len(self.updates) == len(info.update_binding), "a variable is assigned at most once"
        whole = joined(self.model)
        onnx.checker.check_model(whole, full_check=True)
        results = {each.name for each in (*info.algorithm.output, *self.model.graph.output)}
        assert set(self.updates.values()) <= results, "values are outputs of the algorithm or of the inference graph"
        stored = {each.name: each for each in whole.graph.initializer}
        assert len(stored) == len(whole.graph.initializer), "an initializer is stored once"
        self.values: Values = {name: numpy_helper.to_array(stored[name]) for name in self.updates}
        self.program = Program(_fed(whole, self.updates.keys()))

    def initialize(self) -> None:
        """Run the initialization, whose results become values."""
        (info,) = self.model.training_info
        made = _run_alone(self.model, info.initialization)
        for each in info.initialization_binding:
            self.values[each.key] = made[each.value]

    def step(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """One step; returns every output, and updates the values."""
        found = self.program.run({**feeds, **self.values})
        self.values = {name: found[value] for name, value in self.updates.items()}
        return found


def _fed(model: ModelProto, names: Collection[str]) -> ModelProto:
    """The model with some initializers as inputs instead."""
    kept = [each for each in model.graph.initializer if each.name not in names]
    inputs = [
        helper.make_tensor_value_info(each.name, each.data_type, list(each.dims))
        for each in model.graph.initializer
        if each.name in names
    ]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.extend(inputs)
    return model


def _run_alone(model: ModelProto, graph: GraphProto) -> Values:
    alone = ModelProto(ir_version=model.ir_version)
    alone.opset_import.extend(model.opset_import)
    alone.functions.extend(model.functions)
    alone.graph.CopyFrom(graph)
    return Program(alone).run({})
