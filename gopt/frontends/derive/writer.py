"""Appends nodes, states and constants to a model that becomes a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from gopt.errors import UnsupportedError
from gopt.frontends.derive.functions import call
from gopt.frontends.functional_step import UPDATED
from gopt.ir.graph import Tensor, value_info
from gopt.ir.types import TensorType, dtype_code, numpy_dtype
from gopt.sanitize import show


class StepWriter:
    """Writes the nodes after the backward.

    ``values``: first values of states and values of constants, by input. ``states``: input -> the output that replaces
    it.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.values: dict[str, Tensor] = {}
        self.states: dict[str, str] = {}
        graph = model.graph
        self._taken = {
            *(each.name for each in graph.input), *(each.name for each in graph.initializer),
            *(name for node in graph.node for name in node.output),
        }  # fmt: skip

    def claim(self, name: str) -> str:
        """Reserve a name; raises UnsupportedError for one that the forward model has."""
        if name in self._taken:
            raise UnsupportedError(
                f"the model has a value {show(name)}, a name that the step needs", "rename it in the model"
            )
        self._taken.add(name)
        return name

    def call(
        self,
        text: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, float] = {},
        dtype: str = "float64",
    ) -> list[str]:
        """Append a function's nodes, with ``attributes`` as constants of ``dtype``; returns ``outputs``."""
        tensors = {name: array(value, dtype) for name, value in attributes.items()}
        self.append(*call(text, inputs, outputs, tensors, f"{outputs[0]}.made"))
        return list(outputs)

    def append(self, *nodes: NodeProto) -> None:
        """Append nodes; raises UnsupportedError where the forward model has a value with the name of a result."""
        for node in nodes:
            for name in node.output:
                self.claim(name)
        self.model.graph.node.extend(nodes)

    def cast(self, name: str, dtype: str) -> str:
        """The name of a value in another type."""
        made = f"{name}.as_{dtype}"
        if made not in self._taken:
            self.append(onnx.helper.make_node("Cast", [name], [made], to=dtype_code(dtype)))
        return made

    def number(self, name: str, value: float, dtype: str) -> str:
        """The name of a scalar constant."""
        if name not in self._taken:
            self._taken.add(name)
            self.model.graph.initializer.append(numpy_helper.from_array(array(value, dtype), name))
        return name

    def input(self, name: str, kind: TensorType) -> str:
        self.model.graph.input.append(value_info(self.claim(name), kind))
        return name

    def state(self, name: str, first: Tensor) -> str:
        """Add an input that a step replaces, with its first value."""
        self.values[name] = first
        return self.input(name, first.type)

    def replace(self, name: str, kind: TensorType) -> None:
        """Make the value ``NAME_out`` an output, which replaces the state ``NAME``."""
        updated = f"{name}{UPDATED}"
        self.model.graph.output.append(value_info(updated, kind))
        self.states[name] = updated


def array(value: float, dtype: str) -> np.ndarray:
    """A NumPy array of no dimensions, of a type."""
    return np.array(value, numpy_dtype(dtype))


def scalar(value: float, dtype: str = "float32") -> Tensor:
    """A scalar as a Tensor of the graph."""
    return Tensor(TensorType(dtype, ()), array=array(value, dtype))
