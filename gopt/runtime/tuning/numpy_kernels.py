"""Elementwise nodes on long rows, a tile at a time, by NumPy: for operators with results determined by IEEE 754.

IEEE 754 fixes the rounding of a sum, a product, a quotient and a root, so all implementations agree. NumPy uses the
processor's widest vectors and writes into given memory. A tile passes through all nodes while in the cache. Values
between nodes lie in a few rows of scratch memory, reused after their last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.host_value import Value
from gopt.runtime.memory import aligned
from gopt.runtime.partition import Segment
from gopt.runtime.session import Array

TILE = 1 << 15
"""Elements of a tile: a dozen float32 rows of them fit a core's second-level cache."""

Operation: TypeAlias = Callable[..., Any]
"""Operands and ``out``."""

_FLOATS = frozenset({"float16", "float32", "float64"})


def _copy(value: Array, out: Array) -> None:
    np.copyto(out, value, casting="unsafe")


def _where(condition: Array, yes: Array, no: Array, out: Array) -> None:
    np.copyto(out, no)
    np.copyto(out, yes, where=condition)


def _where_of_plus_yes(condition: Array, yes: Array, no: Array, out: Array) -> None:
    np.copyto(out, no)
    np.add(yes, 0.0, out=out, where=condition)


def _where_of_plus_no(condition: Array, yes: Array, no: Array, out: Array) -> None:
    np.add(no, 0.0, out=out)
    np.copyto(out, yes, where=condition)


def unsigned(condition: TensorType, yes: TensorType, no: TensorType) -> int:
    """The branch of Where that loses the sign of a zero: 0 is the first, 1 the second.

    ONNX Runtime merges the two selections by a test for non-zero; a zero of the tested selection becomes +0."""
    return int(condition.elements == no.elements == 1 < yes.elements)


_OPERATIONS: dict[str, Operation] = {
    "Abs": np.absolute, "Add": np.add, "And": np.logical_and, "Cast": _copy, "Div": np.divide, "Equal": np.equal,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Identity": _copy, "Less": np.less,
    "LessOrEqual": np.less_equal, "Mul": np.multiply, "Neg": np.negative, "Not": np.logical_not, "Or": np.logical_or,
    "Sqrt": np.sqrt, "Sub": np.subtract, "Where": _where,
}  # fmt: skip
_ARITHMETIC = frozenset({"Abs", "Add", "Div", "Mul", "Neg", "Sqrt", "Sub"})


def operation(node: Node, types: Mapping[str, TensorType]) -> Operation | None:
    """The NumPy function with the bits of ONNX Runtime for a node; None where bits may differ or types are unknown.

    Operators on float16 and bfloat16 are left to ONNX Runtime, except casts; so are integers where a quotient or an
    overflow is implementation-defined.
    """
    names = [*node.inputs, *node.outputs]
    operands = [types.get(name) for name in names]
    if len(node.outputs) != 1 or any(type is None for type in operands):
        return None
    dtypes = {type.dtype for type in operands if type is not None}
    if node.is_a("Cast"):
        if dtypes == {"float64", "float16"} and types[node.outputs[0]].dtype == "float16":
            return None  # the runtime rounds twice, by way of float32
        return _OPERATIONS["Cast"] if dtypes <= _FLOATS or types[node.inputs[0]].dtype == "bool" else None
    if node.is_a("Where") and not dtypes.isdisjoint(_FLOATS):
        condition, yes, no = (types[name] for name in node.inputs)
        if not (condition.static and yes.static and no.static):
            return None
        if unsigned(condition, yes, no) and yes.dims[-1] == 1:
            return None  # ONNX Runtime's choice depends on the numbers of dimensions
        return _where_of_plus_no if unsigned(condition, yes, no) else _where_of_plus_yes
    if node.is_in(_ARITHMETIC) and not dtypes <= {"float32", "float64"}:
        return None
    return _OPERATIONS[node.op_type] if node.is_in(_OPERATIONS) else None


def _needed(node: Node, types: Mapping[str, TensorType]) -> Operation:
    function = operation(node, types)
    if function is None:
        raise ValueError(f"NumPy does not compute {node.op_type}")
    return function


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One node: indices of operands and result among a tile's buffers."""

    operation: Operation
    operands: tuple[int, ...]
    result: int


class NumpyKernel:
    """The nodes of a segment over rows of ``length`` elements; every node must have an ``operation``.

    ``rows``: the segment's inputs that are rows; all others are single values, with ``constants`` known. ``aliases``:
    result -> the overwritten row."""

    def __init__(
        self, segment: Segment, length: int, rows: Sequence[str], types: Mapping[str, TensorType],
        aliases: Mapping[str, str], constants: Mapping[str, Array],
    ) -> None:  # fmt: skip
        nodes, results = segment.nodes, segment.outputs
        self.inputs = tuple(name for name in segment.inputs if name not in constants)
        self._rows, self._length, self._constants = tuple(rows), length, dict(constants)
        self._singles = tuple(name for name in segment.inputs if name not in set(rows))
        layout = _scratch_layout(nodes, types, results, aliases)
        names = [*self._singles, *self._rows, *(name for name in results if name not in layout.late)]
        index = {name: number for number, name in enumerate(names)}
        index |= {name: len(names) + number for name, number in layout.place.items()}
        self._lines = [
            _Instruction(_needed(node, types), tuple(index[name] for name in node.inputs), index[node.outputs[0]])
            for node in nodes
        ]
        self._direct = [name for name in results if name not in layout.late]
        self._late = [(index[name], name) for name in results if name in layout.late]
        self._scratch = [aligned([min(TILE, length)], dtype) for dtype in layout.dtypes]

    def run(self, values: Mapping[str, Value], results: Mapping[str, Value]) -> None:
        """Compute tile after tile. A result that overwrites a row has the row's memory."""
        into = {name: value.array.reshape(-1) for name, value in results.items()}
        arrays = self._constants | {name: values[name].array for name in self.inputs}
        singles = [arrays[name].reshape(()) for name in self._singles]
        rows = [*(arrays[name].reshape(-1) for name in self._rows), *(into[name] for name in self._direct)]
        late = [(index, into[name]) for index, name in self._late]
        with np.errstate(all="ignore"):
            for start in range(0, self._length, TILE):
                stop = min(start + TILE, self._length)
                tile = [*singles, *[row[start:stop] for row in rows], *[row[: stop - start] for row in self._scratch]]
                for line in self._lines:
                    line.operation(*[tile[operand] for operand in line.operands], out=tile[line.result])
                for slot, row in late:
                    row[start:stop] = tile[slot]


@dataclass(frozen=True, slots=True)
class _ScratchLayout:
    """The scratch rows of values. ``place``: value -> index of a scratch row. ``dtypes``: the types of the rows.

    ``late``: results copied over their row at the end of a tile, because a later node still reads the row."""

    place: dict[str, int]
    dtypes: list[np.dtype[Any]]
    late: set[str]


def _scratch_layout(
    nodes: Sequence[Node], types: Mapping[str, TensorType], results: Sequence[str], aliases: Mapping[str, str]
) -> _ScratchLayout:
    last = {name: position for position, node in enumerate(nodes) for name in node.inputs}
    late = set()
    for place, node in enumerate(nodes):
        row = aliases.get(node.outputs[0])
        # Where writes its last operand first, so it may overwrite only that one.
        if row is not None and (last.get(row, -1) > place or (node.is_a("Where") and row in node.inputs[:2])):
            late.add(node.outputs[0])
    last |= dict.fromkeys(late, len(nodes))
    layout = _ScratchLayout({}, [], late)
    free: list[int] = []
    for place, node in enumerate(nodes):
        done = [
            layout.place[name] for name in dict.fromkeys(node.inputs) if last[name] == place and name in layout.place
        ]
        late_free = done if node.is_a("Where") else []
        free += done[len(late_free) :]
        result = node.outputs[0]
        if result not in results or result in late:
            dtype = numpy_dtype(types[result].dtype)
            fits = next((number for number in free if layout.dtypes[number] == dtype), None)
            if fits is None:
                fits = len(layout.dtypes)
                layout.dtypes.append(dtype)
            else:
                free.remove(fits)
            layout.place[result] = fits
        free += late_free
    return layout
