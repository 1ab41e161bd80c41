"""How errors are planted in rank files: nodes replaced, calls that ask nobody."""

from __future__ import annotations

import onnx
from helpers import calls
from onnx import ModelProto, NodeProto, helper


def replace(model: ModelProto, node: NodeProto, new: list[NodeProto]) -> None:
    """Put other nodes where a node stood."""
    nodes = list(model.graph.node)
    place = next(place for place, each in enumerate(nodes) if each is node or each == node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *new, *nodes[place + 1 :]])


def attribute(node: NodeProto, name: str) -> onnx.AttributeProto:
    return next(each for each in node.attribute if each.name == name)


def gradient_calls(model: ModelProto) -> list[NodeProto]:
    """Calls that average gradients (a scalar call is a sum, a statistic's call stands in its own pass)."""
    return [
        node for node in calls(model, "AllReduce", "ReduceScatter")
        if attribute(node, "reduce").s == b"mean" and not any("statistics" in name for name in node.input)
    ]  # fmt: skip


def own_values(node: NodeProto, rank: int) -> list[NodeProto]:
    """What a call would give if it asked nobody: the rank's own part of its own gradients."""
    if node.op_type == "AllReduce":
        return [helper.make_node("Identity", [old], [new]) for old, new in zip(node.input, node.output)]
    cuts = list(attribute(node, "cuts").ints)
    tag = f"planted.{node.output[0]}"

    def const(role: str, value: int) -> NodeProto:
        return helper.make_node("Constant", [], [f"{tag}.{role}"], value_ints=[value])

    parts = [
        helper.make_node("Reshape", [name, f"{tag}.flat"], [f"{tag}.{place}"]) for place, name in enumerate(node.input)
    ]
    return [
        const("flat", -1), const("start", cuts[rank]), const("stop", cuts[rank + 1]), *parts,
        helper.make_node("Concat", [part.output[0] for part in parts], [f"{tag}.all"], axis=0),
        helper.make_node("Slice", [f"{tag}.all", f"{tag}.start", f"{tag}.stop"], list(node.output)),
    ]  # fmt: skip
