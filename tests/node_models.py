"""Models of a few nodes, typed by the values that they read. Nothing of gopt is imported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = np.ndarray
OPTIONS = onnxruntime.SessionOptions()
OPTIONS.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
OPTIONS.intra_op_num_threads = OPTIONS.inter_op_num_threads = 1
OPTIONS.log_severity_level = 4


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    """A session that changes nothing of the graph."""
    return started(model.SerializeToString(deterministic=True))


def started(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, OPTIONS, providers=["CPUExecutionProvider"])


once = cache(started)
"""The same for one model: tests of many placements run few."""


def info(name: str, value: Array, shape: Sequence[Any] | None = ()) -> ValueInfoProto:
    """``shape`` (): the value's; None: of any rank."""
    dims = value.shape if shape == () else shape
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), dims)


def model_of(
    nodes: Iterable[NodeProto], values: Mapping[str, Array], outputs: Iterable[str], *, opset: int = 20,
    opsets: Iterable[OperatorSetIdProto] = (), stored: Mapping[str, Array] = {}, ir_version: int = 10, **more: Any,
) -> ModelProto:  # fmt: skip
    """``values``: what is fed, ``stored``: what the model has; ``more``: as of ``helper.make_model``."""
    infos = [info(name, value) for name, value in values.items()]
    kept = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(list(nodes), "some", infos, [ValueInfoProto(name=name) for name in outputs], kept)
    sets = list(opsets) or [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=sets, ir_version=ir_version, **more)


def evaluated(
    nodes: Sequence[NodeProto], values: Mapping[str, Array], outputs: Sequence[str], **more: Any
) -> list[Array]:
    """What onnx's own reference makes of values."""
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model_of(nodes, values, outputs, **more)).run(None, dict(values))
    return [np.asarray(each) for each in found]
