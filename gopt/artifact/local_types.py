"""A rank's type of a value: of values held in parts, and of values made by lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import defs, numpy_helper, shape_inference

from gopt.ir.graph import Node
from gopt.ir.opset import opset_of
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType
from gopt.lower.rank_graph import RankGraph
from gopt.spmd.program import SpmdProgram

UNKNOWN = TensorType("undefined", None)


class LocalTypes:
    """Types on the ranks of a variant of a program. Rank by rank and node by node, in the order of the nodes."""

    def __init__(self, program: SpmdProgram) -> None:
        self.program = program
        self._opset = opset_of(program.graph.header)
        self._inferred: dict[object, tuple[TensorType, ...]] = {}

    def on(self, rank: RankGraph) -> OnRank:
        """Return the local types of a rank."""
        return OnRank(self, rank, self.program.mesh.coordinates(rank.rank))

    def infer(self, node: Node, types: Sequence[TensorType], data: Mapping[int, np.ndarray]) -> tuple[TensorType, ...]:
        """Run onnx's shape inference on a node; ``data``: values of constant operands."""
        key = (
            node.op_type, node.domain, str(sorted(node.attributes.items(), key=lambda pair: pair[0])), tuple(types),
            tuple((index, array.tobytes()) for index, array in data.items()),
        )  # fmt: skip
        if key not in self._inferred:
            self._inferred[key] = _infer(node, types, data, self._opset)
        return self._inferred[key]


class OnRank:
    """The types on a rank."""

    def __init__(self, local_types: LocalTypes, rank: RankGraph, coordinates: Mapping[str, int]) -> None:
        self._known, self._rank, self._coordinates = local_types, rank, coordinates
        self._made: dict[str, TensorType] = {state.input: state.type for state in rank.own}

    def of(self, name: str) -> TensorType:
        """The type of a value on the rank; unknown for a value no earlier node made."""
        stated = self._rank.types.get(name) or self._made.get(name)
        if stated is not None:
            return stated
        program = self._known.program
        type, sharding = program.graph.types.get(name), program.sharded.get(name)
        if type is None:
            array = self._rank.constants.get(name)
            return UNKNOWN if array is None else TensorType(array.dtype.name, array.shape)
        if sharding is not None and type.static:
            return TensorType(type.dtype, sharding.local_shape(type.dims, self._coordinates))
        return type

    def results(self, node: Node) -> list[TensorType]:
        """The types of a node's results."""
        program = self._known.program
        types = []
        for index, name in enumerate(node.outputs):
            type = self._rank.types.get(name) or program.graph.types.get(name)
            if name in self._rank.types and type is not None:
                types.append(type)
                continue
            type = self._infer(node, index) if type is None else self.of(name)
            self._made[name] = type
            types.append(type)
        return types

    def _infer(self, node: Node, index: int) -> TensorType:
        """Infer the type of a result of a node added by lowering."""
        constants = self._rank.constants
        operand = self.of(node.inputs[0]) if node.inputs else UNKNOWN
        if node.op_type == "Reshape" and node.inputs[1] in constants and operand.static:
            shape = constants[node.inputs[1]]
            if shape.tolist() == [-1]:
                return TensorType(operand.dtype, (prod(operand.dims),))
        if node.op_type == "Slice" and len(node.inputs) == 3 and operand.static and len(operand.dims) == 1:
            bounds = [constants.get(name) for name in node.inputs[1:]]
            if all(bound is not None and bound.size == 1 for bound in bounds):
                start, stop = (int(bound[0]) for bound in bounds if bound is not None)
                return TensorType(operand.dtype, (stop - start,))
        types = [self.of(name) if name else UNKNOWN for name in node.inputs]
        data = {number: constants[name] for number, name in enumerate(node.inputs) if name in constants}
        outputs = self._known.infer(node, types, data)
        return outputs[index] if index < len(outputs) else UNKNOWN


def _infer(
    node: Node, types: Sequence[TensorType], data: Mapping[int, np.ndarray], opset: int
) -> tuple[TensorType, ...]:
    try:
        schema = defs.get_schema(node.op_type, opset, node.domain)
        protos: dict[str, Any] = {}
        for name, type in zip(node.inputs, types):
            if name and type != UNKNOWN:
                protos[name] = value_info(name, type).type
        if not protos.keys() >= set(filter(None, node.inputs)):
            return ()
        arrays = {node.inputs[index]: numpy_helper.from_array(array) for index, array in data.items()}
        outputs = shape_inference.infer_node_outputs(schema, node.to_proto(), protos, arrays)
    except (onnx.defs.SchemaError, shape_inference.InferenceError, TypeError, ValueError, RuntimeError):
        return ()
    return tuple(read_type(outputs[name]) if name in outputs else UNKNOWN for name in node.outputs)
