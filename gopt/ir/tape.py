"""Writes operators one after the other: each method adds an operator and returns the result's name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from gopt.ir.types import dtype_code, numpy_dtype, scalar_of


def takes_axes(op_type: str, opset: int) -> bool:
    """Return whether axes are an operand of a reduction in a version of the standard operators, and not an
    attribute."""
    return opset >= (13 if op_type == "ReduceSum" else 18)


class Tape(ABC):
    """Operators in the making. ``opset``: the version of the standard operators."""

    opset: int

    @abstractmethod
    def append(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]) -> None:
        """Add an operator."""

    @abstractmethod
    def new_name(self) -> str:
        """Return a name for an unnamed result; asked for once before adding the operator."""

    def op(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add an operator with a single result; returns the result's name."""
        output = output or self.new_name()
        self.append(op_type, inputs, [output], attributes)
        return output

    def constant(self, value: np.ndarray) -> str:
        """A constant of the type and the shape of an array."""
        return self.op("Constant", value=numpy_helper.from_array(value))

    def ints(self, values: Iterable[int]) -> str:
        """A list of int64 numbers, such as axes or a shape."""
        return self.constant(np.array(list(values), np.int64))

    def number(self, value: float, dtype: str) -> str:
        """A scalar."""
        return self.constant(scalar_of(value, dtype))

    def cast(self, name: str, dtype: str, have: str = "") -> str:
        """Return a value in another element type; itself if of the known type ``have`` already."""
        return name if dtype == have else self.op("Cast", name, to=dtype_code(dtype))

    def reshape(self, name: str, shape: Iterable[int], output: str = "") -> str:
        return self.op("Reshape", name, self.ints(shape), output=output)

    def slice(self, name: str, start: int, stop: int, axis: int, step: int = 1) -> str:
        """Return the places from ``start`` to ``stop`` along an axis, or each ``step``-th."""
        bounds = (start, stop, axis) if step == 1 else (start, stop, axis, step)
        return self.op("Slice", name, *(self.ints([bound]) for bound in bounds))

    def reduce(self, op_type: str, name: str, axes: Sequence[int], keepdims: int = 1) -> str:
        """Return a reduction along ``axes``; the value itself without axes."""
        if not axes:
            return name
        if takes_axes(op_type, self.opset):
            return self.op(op_type, name, self.ints(axes), keepdims=keepdims)
        return self.op(op_type, name, axes=list(axes), keepdims=keepdims)

    def filled(self, shape: Sequence[int], value: np.ndarray) -> str:
        """Return a tensor of a number, given as the only element of ``value``."""
        return self.op("ConstantOfShape", self.ints(shape), value=numpy_helper.from_array(value.reshape(1)))

    def zeros(self, shape: Sequence[int], dtype: str) -> str:
        return self.filled(shape, np.zeros(1, numpy_dtype(dtype)))


class ProtoTape(Tape):
    """Operators as ``nodes`` of a file; results without a name are PREFIX.1, PREFIX.2, ..."""

    def __init__(self, prefix: str, opset: int) -> None:
        self.prefix, self.opset = prefix, opset
        self.nodes: list[NodeProto] = []
        self._count = 0

    def append(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]) -> None:
        self.nodes.append(onnx.helper.make_node(op_type, inputs, outputs, **attributes))

    def new_name(self) -> str:
        self._count += 1
        return f"{self.prefix}.{self._count}"
