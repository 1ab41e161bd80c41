"""The two graphs of ONNX Runtime's training artifacts: gradients into accumulators, and one optimizer for all.

Facts of the form: parameters are inputs without values, ``InPlaceAccumulatorV2`` adds a gradient to a buffer that is an
input too, and the optimizer graph takes sequences of tensors, in the order of the parameters, by no name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import NodeProto, ValueInfoProto

from gopt.documents.records import to_document
from gopt.importers.artifacts.folder import ACCUMULATOR, OPTIMIZERS, is_optimizer, is_training, of_type
from gopt.ir.types import TensorType, dtype_name
from gopt.offline.inspect import NamedValue
from gopt.offline.kinds.candidate import FileCandidate
from gopt.text.notebook import HtmlTable

BACKWARD = "Backward pass"
"""The ``doc_string`` of each node of the backward."""
NEXT = "it is one part of training artifacts: gopt shard takes the folder, with both graphs and the checkpoint"


@dataclass(frozen=True, slots=True)
class OrtTrainingInspection(HtmlTable):
    """The training graph of artifacts. ``parameters``: the trained ones; ``inputs``: the batch and frozen parameters,
    which only the checkpoint tells apart."""

    file: str
    file_bytes: int
    loss: str
    forward: int
    backward: int
    accumulators: int
    operators: Mapping[str, int]
    parameters: tuple[NamedValue, ...]
    inputs: tuple[NamedValue, ...]
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "ort_training_model"} | to_document(self)


@dataclass(frozen=True, slots=True)
class OrtOptimizerInspection(HtmlTable):
    """The optimizer graph of artifacts; ``max_norm`` of a clip of all gradients, None without a clip."""

    file: str
    file_bytes: int
    optimizer: str
    constants: Mapping[str, float]
    inputs: tuple[str, ...]
    max_norm: float | None
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "ort_optimizer_model"} | to_document(self)


def is_ort_training(candidate: FileCandidate) -> bool:
    return candidate.model is not None and is_training(candidate.model)


def is_ort_optimizer(candidate: FileCandidate) -> bool:
    """Return whether a model has an optimizer on sequences; an optimizer on tensors is part of a step."""
    return candidate.model is not None and is_optimizer(candidate.model)


def inspect_ort_training(candidate: FileCandidate) -> OrtTrainingInspection:
    """Describe a training graph: the parameters with gradients, forward and backward."""
    model = candidate.model
    assert model is not None
    body = model.graph
    adds = list(of_type(model, ACCUMULATOR))
    types = {value.name: _named(value) for value in body.input}
    apart = {name for node in adds for name in (node.input[0], *node.input[2:])}
    trained = dict.fromkeys(node.input[1].removesuffix("_grad") for node in adds if len(node.input) > 1)
    values = [types[name] for name in trained if name in types]
    backward = sum(node.doc_string == BACKWARD for node in body.node)
    return OrtTrainingInspection(
        file=candidate.path.name,
        file_bytes=candidate.size,
        loss=body.output[0].name if body.output else "",
        forward=len(body.node) - backward - len(adds),
        backward=backward,
        accumulators=len(adds),
        operators=dict(Counter(_label(node) for node in body.node).most_common()),
        parameters=tuple(values),
        inputs=tuple(value for name, value in types.items() if name not in trained and name not in apart),
    )


def inspect_ort_optimizer(candidate: FileCandidate) -> OrtOptimizerInspection:
    """Describe an optimizer graph: the optimizer and the constants."""
    model = candidate.model
    assert model is not None
    node = next(of_type(model, *OPTIMIZERS))
    clip = next(of_type(model, "InplaceClipGradNorm"), None)
    return OrtOptimizerInspection(
        candidate.path.name, candidate.size, node.op_type, _numbers(node),
        tuple(value.name for value in model.graph.input),
        None if clip is None else _numbers(clip).get("max_norm", 1.0),
    )  # fmt: skip


def _label(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}".lstrip(".")


def _numbers(node: NodeProto) -> dict[str, float]:
    kinds = {onnx.AttributeProto.FLOAT: "f", onnx.AttributeProto.INT: "i"}
    return {
        attribute.name: float(getattr(attribute, kinds[attribute.type]))
        for attribute in node.attribute
        if attribute.type in kinds
    }


def _named(value: ValueInfoProto) -> NamedValue:
    tensor = value.type.tensor_type
    supported = tensor.elem_type in onnx.TensorProto.DataType.values() and tensor.elem_type
    dtype = dtype_name(tensor.elem_type) if supported else "undefined"
    if not tensor.HasField("shape"):
        return NamedValue(value.name, dtype, None, 0)
    shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
    kind = TensorType(dtype, shape)
    return NamedValue(value.name, dtype, shape, kind.nbytes if kind.static and supported else 0)
