"""The value of a forward model for a loss: an output, or the operand of an operator applied by the loss itself."""

from __future__ import annotations

from onnx import NodeProto, helper

from gopt.errors import OptionError
from gopt.frontends.derive.forward_model import ForwardModel
from gopt.ir.types import FLOATS, TensorType
from gopt.operators.kinds import VIEWS
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean


def predicted(forward: ForwardModel, wanted: str) -> str:
    """The output read by a loss; raises OptionError for an ambiguous or non-floating output."""
    floats = [name for name in forward.outputs if forward.types[name].dtype in FLOATS]
    if wanted:
        if wanted not in floats:
            hint = did_you_mean(wanted, floats) or f"there are {', '.join(map(show, floats))}"
            raise OptionError(f"--prediction {show(wanted)} is not a floating output of the model", hint)
        return wanted
    if len(floats) != 1:
        raise OptionError(
            f"the model has {len(floats)} floating outputs, and it is ambiguous which one the loss reads",
            f"--prediction {show(floats[0])}" if floats else "name a scalar output with --loss",
        )
    return floats[0]


def before(forward: ForwardModel, prediction: str, op_type: str, kind: TensorType, axis: int | None) -> str:
    """The operand of the operator ``op_type`` making a prediction, of the same type; '' for another operator.

    ``axis``: of the classes, None for a single choice. Copies and operators keeping a shape are passed over.
    """
    makers = {name: node for node in forward.model.graph.node for name in node.output}
    node = makers.get(prediction)
    while node is not None and node.op_type in VIEWS and _keeps(forward, node, kind):
        node = makers.get(node.input[0])
    if node is None or node.op_type != op_type or node.domain not in ("", "ai.onnx"):
        return ""
    rank = len(kind.dims)
    axis_set = next((helper.get_attribute_value(attr) for attr in node.attribute if attr.name == "axis"), -1)
    if op_type == "Softmax" and axis_set % rank != (1 if axis is None else axis) % rank:
        return ""
    return str(node.input[0])


def _keeps(forward: ForwardModel, node: NodeProto, kind: TensorType) -> bool:
    """Return whether a node passes its operand on unchanged, of the type ``kind``."""
    if node.op_type == "Identity":
        return True
    return all(forward.types.get(name) == kind for name in (node.input[0], node.output[0]))
