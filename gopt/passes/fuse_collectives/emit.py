"""Emits the packed call for a bucket of calls."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.collectives.layout import format_shape
from gopt.ir.graph import COMM, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.passes.fuse_collectives.pack import PACKED, Key

NAME = "fuse-collectives"


def fuse(rewriter: GraphRewriter, nodes: Sequence[Node], key: Key, bucket: str) -> Node:
    """Replace calls of one key by one call behind the last input; returns this call."""
    for node in nodes:
        if node.encoded is not None:
            rewriter.remove(node, f"{bucket}: one of {len(nodes)} calls that travel as one")
        else:
            rewriter.discard(node.outputs[0])
    if key.kind in PACKED:
        return _Writer(rewriter, nodes, bucket).packed(key)
    writer = _Writer(rewriter, nodes, bucket)
    return writer.reduce_scatter(key) if key.kind == "ReduceScatter" else writer.all_gather(key)


class _Writer:
    """Adds nodes side by side at one point of the order."""

    def __init__(self, rewriter: GraphRewriter, nodes: Sequence[Node], bucket: str) -> None:
        self.rewriter, self.nodes, self.bucket = rewriter, nodes, bucket
        self.types = rewriter.graph.types
        self.last, self.first = rewriter.between(nodes)
        self._constants: dict[tuple[int, ...], str] = {}

    def packed(self, key: Key) -> Node:
        """All tensors side by side, unchanged."""
        attributes = {name: value for name, value in self.nodes[0].attributes.items() if name != "shapes"}
        if key.kind == "Broadcast":
            attributes["shapes"] = [shape for node in self.nodes for shape in node.attributes["shapes"]]
        inputs = [name for node in self.nodes for name in node.inputs]
        outputs = [name for node in self.nodes for name in node.outputs]
        return self._add(key.kind, inputs, {name: self.types[name] for name in outputs}, COMM, **attributes)

    def reduce_scatter(self, key: Key) -> Node:
        """Emit a reduce-scatter; in the bucket, member r's slices of all tensors are adjacent and form the member's
        shard."""
        inputs: list[str] = []
        members = len(self.nodes[0].attributes["sizes"])
        for member in range(members):
            for position, node in enumerate(self.nodes):
                axis, size = node.attributes["axis"], node.attributes["sizes"][0]
                output = self._named(f"slice{position}_{member}")
                bounds = self._bounds(member * size, (member + 1) * size, axis)
                self._add("Slice", [node.inputs[0], *bounds], {output: self.types[node.outputs[0]]})
                inputs.append(output)
        sizes = [self.types[node.outputs[0]].elements for node in self.nodes]
        shard, length = self._named("shard"), sum(sizes)
        cuts = [member * length for member in range(members + 1)]
        attributes = {"group": key.group, "reduce": key.reduce, "cuts": cuts}
        call = self._add(key.kind, inputs, {shard: TensorType(key.dtype, (length,))}, COMM, **attributes)
        start = 0
        for position, (node, size) in enumerate(zip(self.nodes, sizes)):
            flat = self._named(f"flat{position}")
            bounds = self._bounds(start, start + size, 0)
            self._add("Slice", [shard, *bounds], {flat: TensorType(key.dtype, (size,))})
            self._shape(flat, node.outputs[0])
            start += size
        return call

    def all_gather(self, key: Key) -> Node:
        """The inverse: each member's tensors side by side, then every tensor's slices joined along the axis."""
        flats = []
        for position, node in enumerate(self.nodes):
            flat = self._named(f"flat{position}")
            elements = self.types[node.inputs[0]].elements
            self._add("Reshape", [node.inputs[0], self._ints(-1)], {flat: TensorType(key.dtype, (elements,))})
            flats.append(flat)
        members = len(self.nodes[0].attributes["sizes"])
        length = sum(self.types[name].elements for name in flats)
        shard = self._named("shard")
        self._add("Concat", flats, {shard: TensorType(key.dtype, (length,))}, axis=0)
        parts = {
            self._named(f"slice{index}_{member}"): self.types[node.inputs[0]]
            for member in range(members)
            for index, node in enumerate(self.nodes)
        }
        shapes = [format_shape(type.dims) for type in parts.values()]
        cuts = [member * length for member in range(members + 1)]
        call = self._add(key.kind, [shard], parts, COMM, group=key.group, cuts=cuts, shapes=shapes)
        for position, node in enumerate(self.nodes):
            slices = [self._named(f"slice{position}_{member}") for member in range(members)]
            output = node.outputs[0]
            self._add("Concat", slices, {output: self.types[output]}, axis=node.attributes["axis"])
        return call

    def _add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: dict[str, TensorType],
        domain: str = "",
        **attributes: object,
    ) -> Node:
        due = {"after": self.last} if self.last is not None else {"before": self.first}
        sharding = self.nodes[0].sharding
        return self.rewriter.add(
            op_type, inputs, outputs, domain=domain, attributes=attributes, sharding=sharding, **due
        )

    def _shape(self, flat: str, output: str) -> None:
        type = self.types[output]
        self._add("Reshape", [flat, self._ints(*type.dims)], {output: type})

    def _bounds(self, start: int, stop: int, axis: int) -> list[str]:
        return [self._ints(start), self._ints(stop), self._ints(axis)]

    def _ints(self, *values: int) -> str:
        """An int64 constant, one per value and bucket."""
        if values not in self._constants:
            name = self._constants[values] = self._named(f"ints{len(self._constants)}")
            types = {name: TensorType("int64", (len(values),))}
            self._add("Constant", [], types, value_ints=list(values))
        return self._constants[values]

    def _named(self, role: str) -> str:
        return f"gopt.{NAME}.{self.bucket}.{role}"
