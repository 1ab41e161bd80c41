"""Pads in numbers for windows with gaps: ONNX Runtime forgets the gaps when it computes pads itself."""

from __future__ import annotations

import onnx
from onnx import ModelProto, NodeProto, helper

from gopt.errors import RunError
from gopt.ir.nodes import nested
from gopt.operators.kinds import POOLS
from gopt.runtime.windows import window


def with_pads(model: bytes) -> bytes:
    """The model with the automatic pads of dilated pools in numbers; raises RunError where lengths are open. Nearly all
    models have none, and are not read."""
    if b"SAME_" not in model or b"dilations" not in model:
        return model
    proto = ModelProto.FromString(model)
    pools = [node for node in nested(proto.graph.node) if node.op_type in POOLS and _automatic(node)]
    if not pools:
        return model
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    shapes = {info.name: info.type.tensor_type.shape.dim for info in (*inferred.input, *inferred.value_info)}
    for node in pools:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        dims = [size.dim_value for size in shapes.get(node.input[0], ())][2:]
        if not dims or not all(dims):
            raise RunError(
                f"{node.op_type} {node.output[0]!r} has automatic pads beside dilations, over an open length: ONNX "
                "Runtime would forget the dilations",
                "write its pads in numbers",
            )
        policy = attributes["auto_pad"].decode()
        edges = window(
            dims, attributes["kernel_shape"], attributes.get("strides"), attributes["dilations"], None, policy
        )
        rest = [entry for entry in node.attribute if entry.name != "auto_pad"]
        del node.attribute[:]
        node.attribute.extend([*rest, helper.make_attribute("pads", [*edges.begin, *edges.end])])
    written: bytes = proto.SerializeToString(deterministic=True)
    return written


def _automatic(node: NodeProto) -> bool:
    attributes = {entry.name: entry for entry in node.attribute}
    if "auto_pad" not in attributes or "dilations" not in attributes:
        return False
    return attributes["auto_pad"].s.startswith(b"SAME") and any(step > 1 for step in attributes["dilations"].ints)
