"""Appends nodes, states and constants to a model that becomes a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import ModelProto, numpy_helper

from gopt.autodiff.operators import names_of
from gopt.frontends.derive.functions import call
from gopt.ir.free_names import FreeNames
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.ir.types import TensorType, dtype_code, scalar_of


class StepWriter:
    """Writes the nodes after the backward. Methods take a wished name and return the actual name: another name if taken
    in the forward model.

    ``values``: first values of states and values of constants, by input. ``states``: input -> the output replacing it.
    """

    def __init__(self, model: ModelProto, names: FreeNames) -> None:
        self.model = model
        self.values: dict[str, Tensor] = {}
        self.states: dict[str, str] = {}
        names.add(names_of(model))
        self._names, self._inner = names, names.prefix("made")
        """The second is the prefix of names of values inside functions."""
        self._casts: dict[tuple[str, str], str] = {}
        self._numbers: dict[tuple[str, float, str], str] = {}

    def call(
        self,
        text: str,
        inputs: Sequence[str],
        wished: Sequence[str],
        attributes: Mapping[str, float] = {},
        dtype: str = "float64",
    ) -> list[str]:
        """Append a function's nodes, with ``attributes`` as constants of ``dtype``; returns the results' names."""
        tensors = {name: scalar_of(value, dtype) for name, value in attributes.items()}
        outputs = [self._names.take(name) for name in wished]
        nodes = call(text, inputs, outputs, tensors, f"{self._inner}.{outputs[0]}")
        self.model.graph.node.extend(nodes)
        return outputs

    def node(self, op_type: str, inputs: Sequence[str], wished: str, **attributes: Any) -> str:
        """Append a node of one result; returns its name."""
        name = self._names.take(wished)
        self.model.graph.node.append(onnx.helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def cast(self, name: str, dtype: str) -> str:
        """The name of a value in another type."""
        key = (name, dtype)
        if key not in self._casts:
            self._casts[key] = self.node("Cast", [name], f"{name}.as_{dtype}", to=dtype_code(dtype))
        return self._casts[key]

    def number(self, wished: str, value: float, dtype: str) -> str:
        """The name of a scalar constant."""
        key = (wished, value, dtype)
        if key not in self._numbers:
            name = self._numbers[key] = self._names.take(wished)
            self.model.graph.initializer.append(numpy_helper.from_array(scalar_of(value, dtype), name))
        return self._numbers[key]

    def input(self, wished: str, kind: TensorType) -> str:
        name = self._names.take(wished)
        self.model.graph.input.append(value_info(name, kind))
        return name

    def state(self, wished: str, start: Tensor) -> str:
        """Add an input a step replaces, with the first value."""
        name = self.input(wished, start.type)
        self.values[name] = start
        return name

    def replace(self, name: str, kind: TensorType, updated: str) -> None:
        """Make the value ``updated`` an output, which replaces the state ``name``."""
        self.model.graph.output.append(value_info(updated, kind))
        self.states[name] = updated


def scalar(value: float, dtype: str = "float32") -> Tensor:
    """A scalar as a Tensor of the graph."""
    return Tensor(TensorType(dtype, ()), array=scalar_of(value, dtype))
