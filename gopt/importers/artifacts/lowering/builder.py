"""Writes the standard operators standing for an operator of ONNX Runtime training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.hints import EXPORT_AGAIN
from gopt.ir.external_data import show
from gopt.ir.tape import Tape
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType, known, numpy_dtype

_FEW = 1024
"""Elements of a constant that are read at most."""


class Builder(Tape):
    """Nodes and constants that lowerings emit. ``opset``: the version of the standard operators.

    ``types``: of values of the source, and of new results; ``makers``: the source's nodes by result; ``stored``: the
    source's initializers; ``names``: used names.
    """

    def __init__(
        self, opset: int, types: dict[str, TensorType], makers: Mapping[str, NodeProto],
        stored: Mapping[str, TensorProto], names: set[str],
    ) -> None:  # fmt: skip
        self.opset = opset
        self._types, self.makers, self._stored, self._taken = types, makers, stored, names
        self._own: dict[str, TensorProto] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._nodes: list[NodeProto] = []
        self._label = ""
        self.outputs: tuple[str, ...] = ()
        """Results of the node that is being lowered; '' for one that is left out."""

    # --- known facts of values --------------------------------------------------------------------------------------

    def dtype(self, name: str) -> str:
        """The element type of a value of the source; raises UnsupportedError if unknown."""
        type = self._types.get(name)
        if type is None or not known(type.dtype):
            raise self.refusal(f"the type of {show(name)} is unknown", "save the training graph with its value_info")
        return type.dtype

    def rank(self, name: str) -> int:
        """How many dimensions a value of the source has."""
        type = self._types.get(name)
        if type is None or type.shape is None:
            raise self.refusal(f"the shape of {show(name)} is unknown", "save the training graph with its value_info")
        return len(type.shape)

    def dims(self, name: str, axes: Sequence[int] = ()) -> tuple[int, ...]:
        """The sizes of a value of the source, of some axes or all; they must be numbers."""
        self.rank(name)
        shape = self._types[name].shape or ()
        chosen = tuple(shape[axis] for axis in axes) if axes else shape
        if not all(isinstance(size, int) for size in chosen):
            raise self.refusal(
                f"the shape of {show(name)} is {self._types[name]}, and its sizes are needed",
                "export the forward for a batch of fixed size",
            )
        return chosen  # type: ignore[return-value]

    def integers(self, name: str) -> list[int]:
        """The numbers of a constant of the source."""
        maker = self.makers.get(name)
        proto = self._stored.get(name)
        if maker is not None and maker.op_type == "Constant":
            proto = next((attribute.t for attribute in maker.attribute if attribute.name == "value"), None)
        if proto is None or proto.data_location == TensorProto.EXTERNAL or prod(proto.dims) > _FEW:
            raise self.refusal(f"{show(name)} is not a constant", "export the forward for a batch of fixed size")
        return [int(number) for number in onnx.numpy_helper.to_array(proto).reshape(-1)]

    def integer(self, name: str) -> int:
        """A constant of a single element."""
        (number,) = self.integers(name)
        return number

    def refusal(self, what: str, *hints: str) -> UnsupportedError:
        """The error for the node in work."""
        return UnsupportedError(f"{self._label}: {what}", *hints)

    @property
    def constants(self) -> list[TensorProto]:
        """The constants of all lowered nodes."""
        return list(self._own.values())

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]) -> None:
        self._nodes.append(onnx.helper.make_node(op_type, inputs, outputs, **attributes))

    def new_name(self) -> str:
        return f"\0{len(self._nodes)}"  # no name of a source has a NUL

    def several(self, op_type: str, *inputs: str, results: int, **attributes: Any) -> tuple[str, ...]:
        """Emit an operator with several results; returns their names."""
        names = tuple(f"{self.new_name()}.{index}" for index in range(results))
        self.append(op_type, inputs, names, attributes)
        return names

    def constant(self, value: np.ndarray) -> str:
        """A constant, which equal ones share."""
        key = (value.dtype.name, value.shape, value.tobytes())
        if key not in self._known:
            name = self._known[key] = self.fresh(f"constant_{len(self._known)}")
            self._own[name] = onnx.numpy_helper.from_array(value, name)
        return self._known[key]

    def array(self, value: Any, dtype: str = "int64") -> str:
        """A constant of an element type."""
        return self.constant(np.asarray(value, numpy_dtype(dtype)))

    def number_like(self, value: float, like: str) -> str:
        """A number in the type of a value of the source."""
        return self.number(value, self.dtype(like))

    def fresh(self, name: str) -> str:
        """A name no value has."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    # --- one node ---------------------------------------------------------------------------------------------------

    def lower(self, node: NodeProto, body: Callable[..., Any], attributes: Mapping[str, Any]) -> list[NodeProto]:
        """The nodes standing for ``node``: ``body(builder, *inputs, **attributes)`` returns its results in order.

        A result may be an input of the node. Nodes for unnamed results alone are left out.
        """
        self._nodes, self._label = [], f"{node.op_type} {show(node.name or next(filter(None, node.output), ''))}"
        self.outputs = tuple(node.output)
        try:
            lowered = body(self, *node.input, **attributes)
        except (TypeError, IndexError, ValueError) as error:
            raise InputError(
                f"{self._label} has operands or attributes that do not fit: {error}", EXPORT_AGAIN
            ) from None
        results = lowered if isinstance(lowered, tuple) else (lowered,)
        if len(node.output) > len(results):
            raise InputError(
                f"{self._label} has {len(node.output)} results, and {len(results)} are known", EXPORT_AGAIN
            )
        return self._named(node, dict(zip(results, node.output)), zip(results, node.output))

    def _named(self, node: NodeProto, final: dict[str, str], wanted: Any) -> list[NodeProto]:
        outputs = {name for made_node in self._nodes for name in made_node.output}
        tail, names = [], {}
        for result, output in wanted:
            if not output:
                continue
            if result in outputs and result not in names:
                names[result] = output
            else:
                tail.append(onnx.helper.make_node("Identity", [names.get(result, result)], [output]))
        needed, nodes = {*names, *(name for added in tail for name in added.input)}, []
        for inner in reversed(self._nodes):
            if needed.intersection(inner.output):
                nodes.append(inner)
                needed.update(inner.input)
        stem = node.name or next(filter(None, node.output), node.op_type)
        for index, inner in enumerate(nodes := nodes[::-1]):
            for name in inner.output:
                if name not in names:
                    names[name] = self.fresh(f"{stem}/{inner.op_type}_{index}") if name in needed else ""
        for index, inner in enumerate((*nodes, *tail)):
            inner.name = f"{stem}/{inner.op_type}_{index}"
            inner.input[:] = [names.get(name, name) for name in inner.input]
            if inner.output[0] in names:
                inner.output[:] = [names[name] for name in inner.output]
                while inner.output and not inner.output[-1]:
                    del inner.output[-1]
        return self.learn([*nodes, *tail])

    def learn(self, nodes: list[NodeProto]) -> list[NodeProto]:
        """The same nodes, with types of results as far as inferred by ONNX."""
        if all(name in self._types for node in nodes for name in node.output if name):
            return nodes
        model = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", self.opset)])
        outputs = {name for node in nodes for name in node.output}
        for name in dict.fromkeys(name for node in nodes for name in node.input if name and name not in outputs):
            if (tensor := self._constant(name)) is not None:
                model.graph.initializer.append(tensor)
            elif name in self._types:
                model.graph.input.append(value_info(name, self._types[name]))
        model.graph.node.extend(nodes)
        try:
            infos = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
        except MemoryError:
            raise
        except Exception:  # its exceptions have no common base; a lowering that needs a type says so
            return nodes
        for info in infos:
            self._types.setdefault(info.name, read_type(info.type))
        return nodes

    def _constant(self, name: str) -> TensorProto | None:
        """A small constant, of the source or of a lowering."""
        tensor = self._stored.get(name) or self._own.get(name)
        small = tensor is not None and tensor.data_location != TensorProto.EXTERNAL and prod(tensor.dims) <= _FEW
        return tensor if small else None
