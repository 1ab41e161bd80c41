"""Turns a graph with logical shapes into a member's graph: local types, and local values in shape constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from gopt.ir.constant_folding import Constants, measured
from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.operator_use import use_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.operators.dims.choices import run_written
from gopt.operators.dims.elements import axes_of
from gopt.operators.dims.moves import run_taken
from gopt.operators.dims.windows import paddings, pads, slices
from gopt.operators.kinds import CONVOLUTIONS, POOLS, SIZES
from gopt.records.placements import PARTS, Shard, Sharding
from gopt.spmd.links import OperatorUse
from gopt.spmd.rules import FULL_REDUCTIONS
from gopt.tensor_parallel.builder import PASS, ExpansionBuilder


def localise(graph: Graph, shardings: Mapping[str, Sharding], coordinates: Mapping[str, int]) -> None:
    """Set the types and named shapes of the ranks at some coordinates. Changes the graph in place.

    Initial values of states keep logical types: the writer cuts values.
    """
    local = _Local(graph, shardings, coordinates)
    local.run()


@dataclass(slots=True)
class _Local:
    graph: Graph
    shardings: Mapping[str, Sharding]
    coordinates: Mapping[str, int]
    logical: dict[str, TensorType] = field(init=False)
    build: ExpansionBuilder = field(init=False)
    constants: Constants = field(init=False)

    def __post_init__(self) -> None:
        self.logical = dict(self.graph.types)
        self.build = ExpansionBuilder(self.graph, "local")
        self.constants = Constants(self.graph)

    def run(self) -> None:
        types = self.graph.types
        for name, sharding in self.shardings.items():
            if name in types and sharding.sharding_axes:
                types[name] = self._local(name)
        for table in (self.graph.inputs, self.graph.outputs):
            for name in table:
                table[name] = types.get(name, table[name])
        for node in self.graph.nodes:
            if node.is_in(SIZES) and self._parts(node.inputs[0]):
                self._shape(node)
            elif node.op_type == "MemberMaxPool" and node.domain == SPMD:
                self.slide(node)
            elif node.domain in (COMM, SPMD):
                self._mapping(node)
            elif node.domain in ("", "ai.onnx") and node.op_type in _FIXES and self._concerned(node):
                _FIXES[node.op_type](self, node)

    def _local(self, name: str) -> TensorType:
        type = self.logical[name]
        return TensorType(type.dtype, self.shardings[name].local_shape(type.dims, self.coordinates))

    def _parts(self, name: str) -> bool:
        return name in self.shardings and bool(self.shardings[name].sharding_axes)

    def _concerned(self, node: Node) -> bool:
        return any(self._parts(name) for name in (*node.inputs, *node.outputs))

    def _shape(self, node: Node) -> None:
        """Replace ``Shape`` or ``Size`` by a constant: the whole value's shape."""
        value = measured(node, self.logical[node.inputs[0]].dims)
        assert value is not None
        node.op_type, node.inputs, node.encoded = "Constant", [], None
        node._attributes = {"value": onnx.numpy_helper.from_array(value)}

    def _mapping(self, node: Node) -> None:
        """Set the local lengths of a dimension sharded along another axis as well."""
        for sizes, dim, value in _LENGTHS.get(node.op_type, ()):
            if sizes in node.attributes and node.attributes.get(dim) is not None:
                name, at = (node.inputs if value == "X" else node.outputs)[0], int(node.attributes[dim])
                whole, local = self.logical[name].dims[at], self.graph.types[name].dims[at]
                if local != whole:
                    self._attribute(node, sizes, [size * local // whole for size in node.attributes[sizes]])

    def shaped(self, node: Node, index: int) -> None:
        """Set the local shape of the result."""
        self._read(node, index, self.build.ints(self.graph.types[node.outputs[0]].dims))

    def split(self, node: Node) -> None:
        """Set the local lengths of the pieces."""
        axis = node.attributes.get("axis", 0) % len(self.graph.types[node.inputs[0]].dims)
        sizes = [self.graph.types[name].dims[axis] for name in node.outputs]
        if len(node.inputs) > 1 and node.inputs[1]:
            self._read(node, 1, self.build.ints(sizes))
        elif "split" in node.attributes:
            self._attribute(node, "split", sizes)
        elif "num_outputs" in node.attributes:  # runtimes refuse more pieces than there are elements
            node.inputs = [node.inputs[0], self.build.ints(sizes)]
            node._attributes = {key: value for key, value in node.attributes.items() if key != "num_outputs"}
            node.encoded = None

    def count(self, node: Node, key: str, index: int, dim: int) -> None:
        """Set the local number of groups or heads in a dimension of an operand."""
        if node.attributes.get(key, 1) > 1:
            whole, local = (types[node.inputs[index]].dims for types in (self.logical, self.graph.types))
            if len(whole) > dim and whole[dim] != local[dim]:
                self._attribute(node, key, int(node.attributes[key]) * local[dim] // whole[dim])

    def slide(self, node: Node) -> None:
        """Remove the padding of a dimension with windows, which contain neighbours' elements. Set the local kernel."""
        rank = len(self.logical[node.inputs[0]].dims) - 2
        split = self._split_places(node)
        if not split:
            return
        attrs = dict(node.attributes)
        padding = [self._pads(node, dim) for dim in range(2, rank + 2)]
        padding = [(0, 0) if dim in split else pair for dim, pair in enumerate(padding, 2)]
        attrs |= {"pads": [before for before, _ in padding] + [behind for _, behind in padding], "auto_pad": "NOTSET"}
        if "output_padding" in attrs:
            attrs["output_padding"] = [
                0 if dim in split else pad for dim, pad in enumerate(attrs["output_padding"], 2)
            ]  # fmt: skip
        if "kernel_shape" in attrs and node.is_in(CONVOLUTIONS):
            attrs["kernel_shape"] = list(self.graph.types[node.inputs[1]].dims[2:])
        node._attributes, node.encoded = attrs, None

    def slice(self, node: Node) -> None:
        """Take the whole window, which begins with the member's part of the result."""
        rows = slices(self._described(node))
        split = self._split_places(node, start=0)
        for _, placement in self.shardings[node.inputs[0]].by_axis if node.inputs[0] in self.shardings else ():
            split -= {placement.dim} if isinstance(placement, Shard) and placement.runs > 1 else set()
        if rows is None or not split.intersection(rows):
            return
        before, after = (self.graph.types[name].dims for name in (node.inputs[0], node.outputs[0]))
        starts = [0 if axis in split else start for axis, (start, _) in rows.items()]
        steps = [step for _, step in rows.values()]
        ends = [start + after[axis] * step for axis, start, step in zip(rows, starts, steps)]
        ends = [min(end, before[axis]) for axis, end in zip(rows, ends)]
        if "starts" in node.attributes:
            node._attributes, node.encoded = {"starts": starts, "ends": ends, "axes": list(rows)}, None
        else:
            node.inputs = [node.inputs[0], *map(self.build.ints, (starts, ends, list(rows), steps))]

    def pad(self, node: Node) -> None:
        """Add no padding to a window, which contains the padding."""
        added, split = paddings(self._described(node)), self._split_places(node, start=0)
        if added is None or not any(added[dim] != (0, 0) for dim in split):
            return
        added = [(0, 0) if dim in split else pair for dim, pair in enumerate(added)]
        pads = [before for before, _ in added] + [behind for _, behind in added]
        if "pads" in node.attributes:
            self._attribute(node, "pads", pads)
        else:
            node.inputs = [node.inputs[0], self.build.ints(pads), *node.inputs[2:3]]

    def _split_places(self, node: Node, start: int = 2) -> set[int]:
        """Return the dimensions, from ``start`` on, that are sharded or have windows."""
        shardings = [self.shardings[name] for name in (node.inputs[0], node.outputs[0]) if name in self.shardings]
        return {
            part.dim for row in shardings for _, part in row.by_axis if isinstance(part, PARTS) and part.dim >= start
        }  # fmt: skip

    def _pads(self, node: Node, dim: int) -> tuple[int, int]:
        described = self._described(node)
        strides, dilations = (node.attributes.get(key) for key in ("strides", "dilations"))
        weights = self.logical[node.inputs[1]].dims if node.is_in(CONVOLUTIONS) else ()
        kernel = weights[dim] if weights else node.attributes["kernel_shape"][dim - 2]
        extent = (kernel - 1) * (dilations[dim - 2] if dilations else 1) + 1
        length, result = (self.logical[name].dims[dim] for name in (node.inputs[0], node.outputs[0]))
        return pads(described, dim, strides[dim - 2] if strides else 1, extent, length, result)

    def resize(self, node: Node) -> None:
        """Set the local lengths, where the node names lengths."""
        if len(node.inputs) > 3 and node.inputs[3]:
            dims = self.graph.types[node.outputs[0]].dims
            axes = node.attributes.get("axes", range(len(dims)))
            self._read(node, 3, self.build.ints([dims[axis] for axis in axes]))

    def sliced(self, node: Node) -> None:
        """Set the local bounds of a slice."""
        described = self._described(node)
        local, logical = (types[node.outputs[0]].dims for types in (self.graph.types, self.logical))
        runs = {dim: run for dim, run in run_taken(described).items() if local[dim] != logical[dim]}
        if not runs:
            return
        starts, ends, axes = (described.constant(operand) for operand in (1, 2, 3))
        assert starts is not None and ends is not None
        bounds = [starts.reshape(-1).tolist(), ends.reshape(-1).tolist()]
        for index, axis in enumerate(range(len(starts)) if axes is None else axes.reshape(-1).tolist()):
            dim = axis % len(local)
            if dim in runs:
                bounds[0][index] = runs[dim] * local[dim]
                bounds[1][index] = bounds[0][index] + local[dim]
        self._read(node, 1, *map(self.build.ints, bounds))

    def scattered(self, node: Node) -> None:
        """Set the local bounds of a written slice."""
        length = self.graph.types[node.inputs[2]].dims[0]
        if length != self.logical[node.inputs[2]].dims[0]:
            run = run_written(self._described(node))
            assert run is not None, "no other link cuts what is written along the dimension that is chosen from"
            self._read(node, 1, self._places(run * length, length))

    def _places(self, start: int, length: int) -> str:
        """Return a constant column of consecutive indices, one block for each run."""
        name = f"gopt.{PASS}.local.places_{start}_{length}"
        if name not in self.graph.initializers:
            type = TensorType("int64", (length, 1))
            self.graph.initializers[name] = Tensor(type, array=np.arange(start, start + length).reshape(-1, 1))
            self.graph.types[name] = type
        return name

    def _described(self, node: Node) -> OperatorUse:
        """Return a node with logical types."""
        return use_of(node, replace(self.graph, types=self.logical), self.constants)

    def squeeze(self, node: Node) -> None:
        """Write a Squeeze as a Reshape where a part has one element or none: a Squeeze would drop that dimension."""
        dims = self.graph.types[node.outputs[0]].dims
        named = "axes" in node.attributes or len(node.inputs) > 1
        if 0 in dims or (node.op_type == "Squeeze" and not named):
            node.op_type, node.inputs, node.encoded, node._attributes = "Reshape", [node.inputs[0], ""], None, {}
            _reshape(self, node)

    def reduced(self, node: Node) -> None:
        """Count axes from the front: runtimes cannot count from the back where a dimension has no elements."""
        dims = self.graph.types[node.inputs[0]].dims
        axes = axes_of(self._described(node))
        if 0 not in dims or not axes:
            return
        if len(node.inputs) > 1 and node.inputs[1]:
            self._read(node, 1, self.build.ints(axes))
        elif "axes" in node.attributes:
            self._attribute(node, "axes", axes)

    def _read(self, node: Node, index: int, *names: str) -> None:
        """Let a node read other operands from a place on."""
        node.inputs = [*node.inputs[:index], *names, *node.inputs[index + len(names) :]]

    def _attribute(self, node: Node, key: str, value: Sequence[int] | int) -> None:
        node._attributes = {**node.attributes, key: value if isinstance(value, int) else list(value)}
        node.encoded = None


def _reshape(local: _Local, node: Node) -> None:
    if 0 in local.graph.types[node.outputs[0]].dims and local.constants.opset >= 14:
        node._attributes = {**node.attributes, "allowzero": 1}
        node.encoded = None
    local.shaped(node, 1)


def _convolution(local: _Local, node: Node) -> None:
    local.count(node, "group", 0, 1)
    local.slide(node)


def _slice(local: _Local, node: Node) -> None:
    local.slice(node)
    local.sliced(node)


def _attention(local: _Local, node: Node) -> None:
    if len(local.logical[node.inputs[0]].dims) == 3:  # else heads are a dimension
        local.count(node, "q_num_heads", 0, 2)
        local.count(node, "kv_num_heads", 1, 2)


_LENGTHS = {
    "AllGather": [("sizes", "axis", "Y")],
    "ReduceScatter": [("sizes", "axis", "X")],
    "DimSlice": [("sizes", "axis", "X")],
    "AllToAll": [("concat_sizes", "concat_axis", "Y"), ("split_sizes", "split_axis", "X")],
}
"""Mapping -> (attribute with lengths, attribute with the dimension, the value that is whole along the mapping's
axis)."""
_FIXES: dict[str, Callable[[_Local, Node], None]] = {
    "Reshape": _reshape,
    "Expand": lambda local, node: local.shaped(node, 1),
    "Split": _Local.split,
    "Slice": _slice,
    "ScatterND": _Local.scattered,
    "Squeeze": _Local.squeeze,
    "Unsqueeze": _Local.squeeze,
    "Flatten": _Local.squeeze,
    "Resize": _Local.resize,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "Pad": _Local.pad,
    **dict.fromkeys(sorted(POOLS), _Local.slide),
    "GroupNormalization": lambda local, node: local.count(node, "num_groups", 0, 1),
    "RotaryEmbedding": lambda local, node: local.count(node, "num_heads", 0, 2),
    "Attention": _attention,
    **dict.fromkeys(FULL_REDUCTIONS, _Local.reduced),
}
"""Operators that name lengths, groups or heads -> the function that makes those local."""
