"""One model for batches of any size, from the models of two sizes.

A traced step has the size of the batch in constants: shapes of Reshape, the 1/N of a mean, ranges of rows. Two models
differing in the size alone have the same nodes, and each differing constant is a function of the size. Constants
unexplained by the forms below are refused. The check with eager PyTorch then runs at a third size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.sized_constants import SizedConstants, affine
from gopt.ir.constant_folding import constant_of
from gopt.ir.model_file import refill
from gopt.ir.types import multiple
from gopt.text.sanitize import show

T = TypeVar("T")
SIZE = "batch"
"""The name of the dimension."""
PAIRS = 3
_LEAST = 11


def pairs_of_sizes(dims: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of primes dividing none of a step's dimensions: a constant with both contains the batch.

    There are several pairs, because folding has a limit of bytes, and two models may lie on opposite sides.
    """
    sizes = {size for size in dims if size}
    number = _LEAST
    for _ in range(PAIRS):
        primes: list[int] = []
        while len(primes) < 2:
            if all(number % step for step in range(2, int(number**0.5) + 1)) and all(size % number for size in sizes):
                primes.append(number)
            number += 1
        yield primes[0], primes[1]


def join_sizes(models: tuple[ModelProto, ModelProto], sizes: tuple[int, int]) -> ModelProto:
    """Return the first model with constants as functions of the size, and the size as a dimension of inputs.

    Raises UnsupportedError for the first difference that is no such function.
    """
    one, two = (_lifted(model) for model in models)
    joined = deepcopy(one)
    inputs = [_same_value(a, b, sizes) for a, b in _paired(one.graph.input, two.graph.input, "inputs")]
    outputs = [_same_value(a, b, sizes) for a, b in _paired(one.graph.output, two.graph.output, "outputs")]
    for part, values in ((joined.graph.input, inputs), (joined.graph.output, outputs)):
        refill(part, values)
    sized = next(((name, axis) for name, axis in map(_size_axis, inputs) if axis is not None), None)
    if sized is None:
        raise UnsupportedError(
            "no input has the batch as a dimension, so that --dynamic batch has no effect", "leave it out"
        )
    tensors, second = ({tensor.name: tensor for tensor in model.graph.initializer} for model in (one, two))
    join = _Join(tensors, second, SizedConstants(sizes, *sized))
    nodes = [join.node(*pair) for pair in _paired(one.graph.node, two.graph.node, "nodes")]
    del joined.graph.node[:], joined.graph.initializer[:]
    joined.graph.node.extend([*join.other.nodes, *nodes])
    joined.graph.initializer.extend([*join.kept.values(), *join.other.constants])
    return joined


def _lifted(model: ModelProto) -> ModelProto:
    """The model with the Constant nodes as initializers."""
    lifted = deepcopy(model)
    del lifted.graph.node[:]
    for node in model.graph.node:
        value = constant_of(node)
        if value is None:
            lifted.graph.node.append(node)
        else:
            lifted.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    return lifted


def _paired(one: Sequence[T], two: Sequence[T], what: str) -> Iterator[tuple[T, T]]:
    if len(one) != len(two):
        raise UnsupportedError(
            f"the step has {len(one)} {what} at one size of the batch and {len(two)} at another",
            "export it without --dynamic, at the size that training has",
        )
    return zip(one, two, strict=True)


def _same_value(a: ValueInfoProto, b: ValueInfoProto, sizes: tuple[int, int]) -> ValueInfoProto:
    """An input or output with the dimensions at any size."""
    value = deepcopy(a)
    dims = [[dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in (a, b)]
    if a.name != b.name or len(dims[0]) != len(dims[1]):
        raise _differs(f"{show(a.name)} and {show(b.name)} are of different rank or name")
    for axis, (size, second) in enumerate(zip(*dims)):
        if size == second:
            continue
        line = affine(size, second, sizes)
        if line is None or line[1]:
            raise _differs(f"dimension {axis} of {show(a.name)} is {size} and {second} at {sizes[0]} and {sizes[1]}")
        value.type.tensor_type.shape.dim[axis].dim_param = str(multiple(line[0], SIZE))
    return value


def _size_axis(info: ValueInfoProto) -> tuple[str, int | None]:
    names = [dim.dim_param for dim in info.type.tensor_type.shape.dim]
    return info.name, names.index(SIZE) if SIZE in names else None


def _differs(text: str) -> UnsupportedError:
    return UnsupportedError(
        f"the step holds for one size of the batch alone: {text}",
        "export it without --dynamic, at the size that training has",
    )


@dataclass(slots=True)
class _Join:
    """Nodes of two models, pair by pair. ``first``, ``second``: constants of the two. ``kept``: constants equal at both
    sizes; ``other``: the rest."""

    first: dict[str, TensorProto]
    second: dict[str, TensorProto]
    other: SizedConstants
    kept: dict[str, TensorProto] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _made: dict[tuple[str, str, bool], str] = field(default_factory=dict)

    def node(self, a: NodeProto, b: NodeProto) -> NodeProto:
        """The node at any size."""
        if (a.domain, a.op_type, len(a.input), len(a.output)) != (b.domain, b.op_type, len(b.input), len(b.output)):
            raise _differs(f"{a.op_type} {show(a.name)} is {b.op_type} {show(b.name)} at another size")
        if [attribute.SerializeToString() for attribute in a.attribute] != [
            attribute.SerializeToString() for attribute in b.attribute
        ]:
            raise _differs(f"an attribute of {a.op_type} {show(a.name)} depends on the size")
        joined = deepcopy(a)
        for index, (x, y) in enumerate(zip(a.input, b.input)):
            joined.input[index] = self._operand(x, y, a, index)
        self._names.update(zip(a.output, b.output))
        return joined

    def _operand(self, x: str, y: str, reader: NodeProto, index: int) -> str:
        if x not in self.first:
            if self._names.get(x, x) != y:
                raise _differs(f"{reader.op_type} {show(reader.name)} reads another value at another size")
            return x
        if y not in self.second:
            raise _differs(f"{reader.op_type} {show(reader.name)} reads a constant at one size alone")
        one, two = (numpy_helper.to_array(tensor) for tensor in (self.first[x], self.second[y]))
        if one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes():
            self.kept[x] = self.first[x]
            return x
        infers = reader.op_type == "Reshape" and index == 1
        if (x, y, infers) not in self._made:
            name_sized = self.other.function(one, two, f"{x}.at_size{len(self._made) or ''}", infers)
            if name_sized is None:
                raise _differs(
                    f"{reader.op_type} {show(reader.name)} reads a constant of shape {list(one.shape)}, which is not a "
                    "known function of the size"
                )
            self._made[x, y, infers] = name_sized
        return self._made[x, y, infers]
