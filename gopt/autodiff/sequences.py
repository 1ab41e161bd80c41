"""Sequences split from a value and read at fixed places, as exporters write a chunk: replaced by a Split."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from gopt.autodiff.operators import ForwardOperator, bodies, names_of, types_of
from gopt.autodiff.rewrites import Constants, constants_of
from gopt.ir.free_names import FreeNames
from gopt.ir.model_file import refill
from gopt.ir.nodes import reads
from gopt.ir.types import TensorType


def split_without_sequences(model: ModelProto) -> ModelProto:
    """Replace each SplitToSequence read by SequenceAt alone, at constant places, by a Split."""
    splits = [node for node in model.graph.node if node.op_type == "SplitToSequence"]
    if not splits:
        return model
    constants, types, names = constants_of(model), types_of(model), FreeNames(names_of(model))
    readers: dict[str, list[NodeProto]] = {node.output[0]: [] for node in splits}
    outer = {value.name for value in model.graph.output}
    outer.update(name for body in bodies(model.graph.node) for inner in body.node for name in reads(inner))
    for node in model.graph.node:
        for name in set(node.input) & set(readers):
            readers[name].append(node)
    parts: dict[str, list[str]] = {}
    inner = readers.keys() - outer
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if not inner.isdisjoint(node.output):
            sizes = _sizes(ForwardOperator.of(node, types), constants, types)
            if sizes is not None and all(_at(reader, len(sizes), constants) for reader in readers[node.output[0]]):
                parts[node.output[0]] = [names.take(f"{node.output[0]}.{index}") for index in range(len(sizes))]
                nodes += _split(node, sizes, parts[node.output[0]], names)
                continue
        if node.op_type == "SequenceAt" and node.input[0] in parts:
            part = parts[node.input[0]][int(constants[node.input[1]].reshape(()))]
            nodes.append(helper.make_node("Identity", [part], [node.output[0]]))
            continue
        nodes.append(node)
    changed = deepcopy(model)
    refill(changed.graph.node, nodes)
    return changed


def _sizes(operator: ForwardOperator, constants: Constants, types: Mapping[str, TensorType]) -> list[int] | None:
    """Return the sizes of the parts; None if not constant, or if a part loses the dimension."""
    node = operator.node
    kind, array = types.get(node.input[0]), constants.get(node.input[1]) if len(node.input) > 1 else None
    if kind is None or not kind.static or array is None:
        return None
    extent = kind.dims[operator.attributes.get("axis", 0) % len(kind.dims)]
    if array.ndim:
        return [int(size) for size in array]
    size = int(array)
    return [min(size, extent - start) for start in range(0, extent, size)] if size > 0 else None


def _at(reader: NodeProto, count: int, constants: Constants) -> bool:
    """Return whether a node reads one of ``count`` parts at a constant place."""
    index = constants.get(reader.input[1]) if reader.op_type == "SequenceAt" else None
    return index is not None and -count <= int(index.reshape(())) < count


def _split(node: NodeProto, sizes: list[int], parts: list[str], names: FreeNames) -> list[NodeProto]:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    name = names.take(f"{node.output[0]}.sizes")
    constant = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(sizes, np.int64)))
    return [constant, helper.make_node("Split", [node.input[0], name], parts, axis=axis)]
