"""Writes one training step as ONNX, value by value; each is computed as it is written, so that its shape is known.

A step is a function of a ``Writer``: called twice with one seed, for a rank's samples and for the samples of all ranks,
it gives the source and its truth. All choices come from ``pick``, all numbers from ``draw``: neither knows the batch.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import node_models
import numpy as np
import onnx
from node_models import evaluated
from onnx import NodeProto, helper, numpy_helper

Array = np.ndarray
OPSET = 20


@dataclass(eq=False)
class Value:
    """A value of the step and one reading of it, from which only its shape and type are used."""

    w: Writer
    name: str
    held: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    def __add__(self, other: Any) -> Value:
        return self.w.op("Add", self, self.w.like(other, self))

    def __sub__(self, other: Any) -> Value:
        return self.w.op("Sub", self, self.w.like(other, self))

    def __mul__(self, other: Any) -> Value:
        return self.w.op("Mul", self, self.w.like(other, self))

    def __truediv__(self, other: Any) -> Value:
        return self.w.op("Div", self, self.w.like(other, self))

    def __radd__(self, other: Any) -> Value:
        return self.w.op("Add", self.w.like(other, self), self)

    def __rsub__(self, other: Any) -> Value:
        return self.w.op("Sub", self.w.like(other, self), self)

    def __rmul__(self, other: Any) -> Value:
        return self.w.op("Mul", self.w.like(other, self), self)

    def __rtruediv__(self, other: Any) -> Value:
        return self.w.op("Div", self.w.like(other, self), self)

    def __matmul__(self, other: Value) -> Value:
        return self.w.op("MatMul", self, other)

    def __neg__(self) -> Value:
        return self.w.op("Neg", self)

    def reshape(self, *shape: int) -> Value:
        return self.w.op("Reshape", self, self.w.const(np.array(shape, np.int64)))

    def turn(self, *perm: int) -> Value:
        return self.w.op("Transpose", self, perm=list(perm or range(len(self.shape))[::-1]))

    def sum(self, *axes: int, keep: bool = False) -> Value:
        return self.w.reduced("ReduceSum", self, axes, keep)

    def mean(self, *axes: int, keep: bool = False) -> Value:
        return self.w.reduced("ReduceMean", self, axes, keep)

    def to(self, dtype: Any) -> Value:
        return self.w.op("Cast", self, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def sqrt(self) -> Value:
        return self.w.op("Sqrt", self)


@dataclass
class Record:
    """What the step did to make a value, for its derivative."""

    op: str
    inputs: list[Value]
    outputs: list[Value]
    attributes: dict[str, Any]


@dataclass
class Writer:
    seed: int
    samples: int
    """How many samples the batch has."""
    scale: int = 1
    """For how many ranks this is the whole batch: what a summed loss has to know."""
    dtype: Any = np.float64
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    stored: dict[str, Array] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    batch: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = field(default_factory=dict)
    hyper: dict[str, Array] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    """Input of a state to the output that replaces it."""
    gradients: dict[str, Value] = field(default_factory=dict)
    """Of each parameter."""
    tape: list[Record] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """What the step needs of gopt, such as a loss reduction."""
    stated: dict[str, str] = field(default_factory=dict)
    """Statistic to how gopt is told that ranks combine it."""
    told: bool = False
    """Whether gopt has to be told which output replaces which state."""
    said: list[str] = field(default_factory=list)
    """The choices made, in order."""
    refusal: str = ""
    """A pattern of the refusal that is right for this step, too."""
    open: bool = False
    """Whether the file leaves the number of samples open."""
    apart: list[str] = field(default_factory=list)
    """States of which each trainer of a split has its own."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.count = 0

    # choices and numbers

    def pick(self, *choices: Any) -> Any:
        found = self.random.choice(choices)
        self.said.append(getattr(found, "__name__", str(found)))
        return found

    def draw(self, name: str, shape: Sequence[int], low: float = -0.5, high: float = 0.5) -> Array:
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return np.asarray(generator.uniform(low, high, tuple(shape))).astype(self.dtype)

    # values

    def op(self, op: str, *inputs: Value | None, out: int = 1, domain: str = "", **attributes: Any) -> Any:
        """A node; with several outputs a list of values."""
        self.count += 1
        names = [f"v{self.count}_{place}" if out > 1 else f"v{self.count}" for place in range(out)]
        read = [each.name if each is not None else "" for each in inputs]
        node = helper.make_node(op, read, names, name=f"n{self.count}", domain=domain, **attributes)
        held = self._run(node, [each for each in inputs if each is not None])
        made = [Value(self, name, each) for name, each in zip(names, held, strict=True)]
        self.nodes.append(node)
        self.tape.append(Record(op, list(inputs), made, attributes))  # type: ignore[arg-type]
        return made[0] if out == 1 else made

    def _run(self, node: NodeProto, inputs: Sequence[Value], more: Sequence[Value] = ()) -> list[Array]:
        given = {each.name: each.held for each in (*inputs, *more)}
        return evaluated([node], given, node.output, opsets=self.opsets(), functions=self.functions)

    def captured(
        self, op: str, inputs: Sequence[Value], outer: Sequence[Value], out: int = 1, **attributes: Any
    ) -> Any:
        """A node with bodies that read ``outer``."""
        self.count += 1
        names = [f"v{self.count}_{place}" for place in range(out)]
        node = helper.make_node(op, [each.name for each in inputs], names, name=f"n{self.count}", **attributes)
        made = [Value(self, name, each) for name, each in zip(names, self._run(node, inputs, outer), strict=True)]
        self.nodes.append(node)
        self.tape.append(Record(op, list(inputs), made, attributes))
        return made[0] if out == 1 else made

    def const(self, value: Any, how: str | None = None) -> Value:
        """A constant: an initializer, a node, or what a node makes of one."""
        array = np.asarray(value)
        how = how or self.random.choice(["stored", "stored", "node", "node", "made", "filled"])
        self.count += 1
        name = f"c{self.count}"
        if how == "filled" and array.size and array.ndim <= 1 and (array.ravel() == array.ravel()[0]).all():
            shape = self.const(np.array(array.shape, np.int64), "stored")
            one = numpy_helper.from_array(array.ravel()[:1])
            node = helper.make_node("ConstantOfShape", [shape.name], [name], value=one)
        elif how == "made" and array.dtype.kind in "f" and array.dtype == np.dtype(self.dtype):
            other = self.const(-array, "stored")
            node = helper.make_node("Neg", [other.name], [name])
        elif how == "stored":
            self.stored[name] = array
            return Value(self, name, array)
        else:
            node = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
        self.nodes.append(node)
        return Value(self, name, array)

    def like(self, value: Any, other: Value) -> Value:
        return value if isinstance(value, Value) else self.const(np.array(value, other.held.dtype))

    def reduced(self, op: str, value: Value, axes: Sequence[int], keep: bool) -> Value:
        if not axes:
            return self.op(op, value, keepdims=int(keep))
        return self.op(op, value, self.const(np.array(axes, np.int64)), keepdims=int(keep))

    # the step's interface

    def fed(self, name: str, shape: Sequence[int], draw: Callable[..., Array] | None = None) -> Value:
        """An input of the batch; ``shape`` is that of one sample."""
        draw = draw or (lambda generator, size: generator.standard_normal(size).astype(self.dtype))
        self.batch[name] = draw
        array = draw(np.random.default_rng(self.seed), (self.samples, *shape))
        self.inputs[name] = array
        return Value(self, name, array)

    def setting(self, name: str, value: float) -> Value:
        self.hyper[name] = self.inputs[name] = np.array(value, self.dtype)
        return Value(self, name, self.inputs[name])

    def state(self, name: str, value: Any) -> Value:
        array = np.asarray(value)
        self.inputs[name] = self.stored[name] = array
        return Value(self, name, array)

    def becomes(self, state: Value, new: Value, output: str | None = None) -> None:
        if new.shape != state.shape and new.held.size == state.held.size:  # a rate of shape [1] on a scalar
            new = new.reshape(*state.shape)
        assert state.shape == new.shape and state.held.dtype == new.held.dtype, (state.name, state.shape, new.shape)
        output = output or f"{state.name}.new"
        self.out(output, new)
        self.states[state.name] = output

    def out(self, output: str, value: Value) -> None:
        """Give a value an output's name, by renaming what makes it or by an Identity."""
        made = {name for node in self.nodes for name in node.output}
        taken = {each.name for each in self.outputs.values()}
        if value.name in made and value.name not in taken:
            for node in self.nodes:
                node.output[:] = [output if each == value.name else each for each in node.output]
                _rename(node, value.name, output)
            value.name = output
        else:
            self.nodes.append(helper.make_node("Identity", [value.name], [output]))
        self.outputs[output] = Value(self, output, value.held)

    def opsets(self) -> list[onnx.OperatorSetIdProto]:
        return [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]

    def model(self) -> onnx.ModelProto:
        def info(name: str, array: Array) -> onnx.ValueInfoProto:
            shape = ("samples", *array.shape[1:]) if self.open and name in self.batch else array.shape
            return node_models.info(name, array, shape)

        graph = helper.make_graph(
            self.nodes, "step", [info(*each) for each in self.inputs.items()],
            [info(name, each.held) for name, each in self.outputs.items()],
            [numpy_helper.from_array(np.ascontiguousarray(v).reshape(v.shape), n) for n, v in self.stored.items()],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=self.opsets(), functions=self.functions, ir_version=9)
        onnx.checker.check_model(model)
        return model


def _rename(node: NodeProto, old: str, new: str) -> None:
    node.input[:] = [new if each == old else each for each in node.input]
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for inner in attribute.g.node:
                _rename(inner, old, new)
