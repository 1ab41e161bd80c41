"""The work of each node of a step on a rank, and the time on a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gopt.analysis.flops import node_flops
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.host_copies import HOST
from gopt.ir.node_kinds import elementwise, record_of, swaps_last_axes, value_reads
from gopt.offline.device import FLOATS, DeviceFigures
from gopt.operators.kinds import MATRIX_PRODUCTS, PARTS
from gopt.operators.operator import Shape
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.stage_plan import transfers
from gopt.spmd.step_memory import SHARES_MEMORY


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The work of a node: operations of products of a type, bytes read and written, operators started. ``fused``:
    whether the node passes over memory together with others."""

    flops: int = 0
    nbytes: int = 0
    dtype: str = "float32"
    launches: int = 0
    fused: bool = False

    def seconds(self, device: DeviceFigures) -> float:
        """The start, and the roofline: operations or bytes, whichever takes longer."""
        stream = device.fused_stream if self.fused else device.stream
        return self.launches * device.launch + max(self.flops / device.peak(self.dtype), self.nbytes / stream)


NOTHING = NodeWork()
"""The work of views, which cost nothing, and of calls, which are timed apart."""


def node_works(
    nodes: Sequence[Node], sizes: LocalSizes, results: Collection[str], fuse_from: int | None
) -> list[NodeWork]:
    """The work of each node; two sweeps, linear.

    A node reads operands and writes results; a pick of elements reads as many bytes as are written. ``fuse_from``:
    elementwise nodes on values of at least so many elements hand on values of equal size without memory in between,
    unless another node reads the value, or it is in ``results``."""
    rows = _Rows(nodes, sizes, results, fuse_from)
    return [_work(node, sizes, rows) for node in nodes]


def graph_works(graph: Graph, nodes: Sequence[Node], fuse_from: int | None) -> list[NodeWork]:
    """The work of nodes of a rank's own graph."""
    return node_works(nodes, LocalSizes(graph), graph.outputs, fuse_from)


class _Rows:
    """Values handed on between elementwise nodes: value -> number of elements."""

    def __init__(
        self, nodes: Sequence[Node], sizes: LocalSizes, results: Collection[str], fuse_from: int | None
    ) -> None:
        self.length: dict[int, int] = {}
        """Id of an elementwise node -> elements of the result, for nodes that are fused."""
        self.made: dict[str, int] = {}
        self.written: set[str] = set()
        """Values of fused nodes that another node reads."""
        kept = {*results}.union(*(node.reads for node in nodes if not node.is_in(MATRIX_PRODUCTS)))
        self.read_in_place = {
            name for node in nodes for name in node.outputs if name not in kept and _swaps(node, sizes.shape(name))
        }
        """Transposes that matrix products alone read: they read an operand in either order."""
        if fuse_from is None:
            return
        for node in nodes:
            shape = sizes.shape(node.outputs[0]) if elementwise(node) else None
            if shape is not None and (elements := math.prod(shape)) >= fuse_from:
                self.length[id(node)] = elements
                self.made[node.outputs[0]] = elements
        for node in nodes:
            length = self.length.get(id(node), -1)
            self.written.update(name for name in node.reads if self.made.get(name, length) != length)
        self.written.update(name for name in self.made if name in results)

    def passed_on(self, node: Node, name: str) -> bool:
        """Return whether a node reads a value from the node before, and not from memory."""
        return name in self.made and self.made[name] == self.length.get(id(node))

    def stays(self, node: Node) -> bool:
        """Return whether the result of a node is never written."""
        return id(node) in self.length and node.outputs[0] not in self.written


def _swaps(node: Node, shape: Shape | None) -> bool:
    return shape is not None and swaps_last_axes(node, len(shape))


def _work(node: Node, sizes: LocalSizes, rows: _Rows) -> NodeWork:
    if node.domain in (COMM, HOST) or transfers(node) or not node.inputs:
        return NOTHING
    if node.op_type in SHARES_MEMORY or node.outputs[0] in rows.read_in_place:
        return NOTHING
    written = 0 if rows.stays(node) else sum(map(sizes.nbytes, filter(None, node.outputs)))
    reads = [name for name in dict.fromkeys(value_reads(node)) if not rows.passed_on(node, name)]
    picks = record_of(node).indices is not None or node.op_type in PARTS
    read = written * picks + sum(map(sizes.nbytes, reads[picks:]))
    type = sizes.types.get(node.inputs[0])
    dtype = type.dtype if type is not None and type.dtype in FLOATS else FLOATS[1]
    goes_on = len(reads) < len(set(value_reads(node)))
    return NodeWork(
        node_flops(node, sizes.shape), read + written, dtype, 0 if goes_on else 1, goes_on or rows.stays(node)
    )
