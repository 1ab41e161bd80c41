"""Splits long elementwise runs into tiles that fit a cache: an update passes over memory once, not once per operator.

A segment is split into runs of elementwise nodes on long rows of one length, and the rest. LLVM or NumPy computes a run
where it gives the bits of ONNX Runtime; else the run becomes one small session with an open length, bound by address to
tile after tile of the rows. A result may overwrite an operand after the operand's last use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import elementwise
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.host_value import Value, bind_memory
from gopt.runtime.partition import OverwritingSegment, Segment
from gopt.runtime.planner.memory_planner import BufferViews
from gopt.runtime.proto import is_embedded
from gopt.runtime.session import SessionCache, run_bound, session_of
from gopt.runtime.tuning.llvm_kernels import LlvmKernel, is_supported
from gopt.runtime.tuning.numpy_kernels import TILE, NumpyKernel, operation

MIN_TILED_LENGTH = 1 << 16
"""Fewest elements of a run that is cut into tiles."""
MIN_SPLIT_LENGTH = 1 << 13
"""Fewest elements of a run for which a session is cut in two."""
MIN_FREE_LENGTH = 1 << 5
"""Fewest elements of a run that is taken out where no session is cut for it: a call costs less than its nodes."""

_ROWS = frozenset({"float32", "float64", "float16", "int32", "int64", "bool", "uint8", "int8"})
"""Types that the runtime binds by address."""


MIN_NODES = 4
"""Fewest nodes of a long run that is taken out: fewer pass over memory hardly more often than a tile does."""
MIN_NODES_SHORT = 8
"""The same of a run shorter than ``MIN_TILED_LENGTH``."""


@dataclass(frozen=True, slots=True)
class ElementwiseRun(OverwritingSegment):
    """Elementwise nodes over tensors of ``length`` elements, flattened; ``rows``: the inputs that are rows."""

    length: int
    types: dict[str, TensorType]
    """Of its results."""

    @property
    def title(self) -> str:
        """The name in a trace."""
        return f"{len(self.segment.nodes)} elementwise over {self.length}"


def split_elementwise(segment: Segment, types: Mapping[str, TensorType]) -> list[Segment | ElementwiseRun]:
    """The parts of a segment in run order; the segment itself without long rows.

    A node's turn counts the changes from rows to other values on the path to the node; a node on rows waits for the
    turn of its readers. Linear time."""
    lengths = _lengths(segment, types)
    parts = _parts(segment, lengths)
    short = {
        id(node) for (_, length), nodes in parts.items() if length
        for part in _independent_runs(nodes, types, length) if not _is_profitable(part, length) for node in part
    }  # fmt: skip
    if short:
        lengths = [0 if id(node) in short else length for node, length in zip(segment.nodes, lengths)]
        parts = _parts(segment, lengths)
    if not any(lengths):
        return [segment]
    # Within a turn the rest (length 0) comes first; runs of different lengths do not read one another.
    whole = [(parts[key], key[1]) for key in sorted(parts)]
    pieces = [
        (nodes, size) for part, size in whole for nodes in (_independent_runs(part, types, size) if size else [part])
    ]
    ordered, lengths = [nodes for nodes, _ in pieces], [size for _, size in pieces]
    wanted = set(segment.outputs)
    segments: list[Segment | ElementwiseRun] = []
    for nodes, length in zip(reversed(ordered), reversed(lengths)):
        part = _part(nodes, wanted)
        wanted.update(part.inputs)
        # A short run that is already separate is cheaper in NumPy or LLVM than in a session of its own.
        fast = _is_profitable(nodes, length) or all(operation(node, types) is not None for node in nodes)
        segments.append(_run(part, length, types) if length and fast else part)
    return segments[::-1]


def _is_profitable(nodes: Sequence[Node], length: int) -> bool:
    return len(nodes) >= (MIN_NODES if length >= MIN_TILED_LENGTH else MIN_NODES_SHORT)


def _independent_runs(nodes: Sequence[Node], types: Mapping[str, TensorType], length: int) -> list[list[Node]]:
    """Separate runs that share no row, because the memory of a tile must fit the cache. Union-find over rows, in
    order."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    rows = [[x for x in (*node.reads, *node.outputs) if x and types[x].elements == length] for node in nodes]
    for names in rows:
        for name in names[1:]:
            parent[root(name)] = root(names[0])
    runs: dict[str, list[Node]] = {}
    for node, names in zip(nodes, rows):
        runs.setdefault(root(names[0]), []).append(node)
    return list(runs.values())


def _parts(segment: Segment, lengths: Sequence[int]) -> dict[tuple[int, int], list[Node]]:
    """The nodes by turn and length."""
    turn: dict[str, tuple[int, bool]] = {}
    turns: list[int] = []
    for node, length in zip(segment.nodes, lengths):
        before = [turn[name] for name in node.reads if name in turn]
        turns.append(max((turn + (in_run and not length) for turn, in_run in before), default=0))
        turn.update((name, (turns[-1], bool(length))) for name in node.outputs)
    due: dict[str, int] = {}
    for position in range(len(turns) - 1, -1, -1):
        node, length = segment.nodes[position], lengths[position]
        users = [due[name] for name in node.outputs if name in due]
        if length and users:
            turns[position] = min(users)
        for name in node.reads:
            latest = turns[position] - (not length)
            due[name] = min(due.get(name, latest), latest)
    parts: dict[tuple[int, int], list[Node]] = {}
    for node, length, stage in zip(segment.nodes, lengths, turns):
        parts.setdefault((stage, length), []).append(node)
    return parts


def _lengths(segment: Segment, types: Mapping[str, TensorType]) -> list[int]:
    """Every node's number of elements, or 0 for nodes outside tiles.

    Rows below MIN_TILED_LENGTH are tiled only by NumPy or LLVM: from MIN_FREE_LENGTH on, or from MIN_SPLIT_LENGTH on
    where an untiled node reads the result and splits a session in two."""
    lengths: list[int] = []
    waited: set[str] = set()
    for node in reversed(segment.nodes):
        length = _length(node, types)
        free = waited.isdisjoint(node.outputs)
        exact = length < MIN_TILED_LENGTH and operation(node, types) is not None
        if length < MIN_TILED_LENGTH and not (exact and length >= (MIN_FREE_LENGTH if free else MIN_SPLIT_LENGTH)):
            length = 0
        if not length or not free:
            waited.update(node.reads)
        lengths.append(length)
    return lengths[::-1]


def _length(node: Node, types: Mapping[str, TensorType]) -> int:
    """The number of elements of the equally shaped tensors of an elementwise node; 0 for any other node."""
    if not elementwise(node) or node.captures:
        return 0
    shapes = set()
    for name in (*node.inputs, *node.outputs):
        type = types.get(name)
        if name and (type is None or not type.static or type.dtype not in _ROWS):
            return 0
        if name and type is not None and (type.elements != 1 or len(type.dims) > 1):
            shapes.add(type.dims)
    if len(shapes) != 1 or any(types[name].dims not in shapes for name in node.outputs if name):
        return 0
    return math.prod(shapes.pop())


def _part(nodes: Sequence[Node], wanted: set[str]) -> Segment:
    results = {name for node in nodes for name in node.outputs}
    inputs = dict.fromkeys(name for node in nodes for name in node.reads if name not in results)
    outputs = dict.fromkeys(name for node in nodes for name in node.outputs if name in wanted)
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs))


def _run(part: Segment, length: int, types: Mapping[str, TensorType]) -> ElementwiseRun:
    rows = tuple(name for name in part.inputs if types[name].elements == length)
    return ElementwiseRun(part, rows, length, {name: types[name] for name in part.outputs})


class TileKernel(Protocol):
    """Computes a run, tile by tile."""

    inputs: tuple[str, ...]

    def run(self, values: Mapping[str, Value], results: Mapping[str, Value]) -> None:
        """``values``: of the inputs; ``results``: the memory of the results, possibly of a row."""


class CompiledRun:
    """A compiled run. ``aliases``: result -> the overwritten row; all other results have fixed memory."""

    def __init__(self, run: ElementwiseRun, aliases: Mapping[str, str], kernel: TileKernel, views: BufferViews) -> None:
        self.inputs, self.outputs = kernel.inputs, run.segment.outputs
        self.title = run.title
        self._kernel, self._aliases = kernel, aliases
        self._views = {name: views[name][0] for name in self.outputs if name not in aliases and len(views[name]) == 1}
        self._turns = {name: list(views[name]) for name in self.outputs if name not in aliases and len(views[name]) > 1}
        self.overwrites = frozenset(self._aliases.values())
        """Inputs whose memory is written."""

    def run(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Compute tile after tile; returns the results by name."""
        results = dict(self._views)
        for name, row in self._aliases.items():
            results[name] = values[row]
        for name, views in self._turns.items():
            views.reverse()
            results[name] = views[0]
        self._kernel.run(values, results)
        return results


def compile_run(
    run: ElementwiseRun,
    aliases: Mapping[str, str],
    graph: Graph,
    types: dict[str, TensorType],
    cache: SessionCache,
    views: BufferViews,
) -> CompiledRun:
    """Compile a run, with the fastest supporting kernel."""
    segment = run.segment
    kernel: TileKernel
    if all(operation(node, types) is not None for node in segment.nodes):
        small = [name for name in segment.inputs if is_embedded(graph, name)]
        constants = {name: graph.initializers[name].numpy() for name in small}
        crossing = len(segment.inputs) + len(segment.outputs)
        kind = LlvmKernel if is_supported(segment.nodes, types, crossing) else NumpyKernel
        kernel = kind(segment, run.length, run.rows, types, aliases, constants)
    else:
        kernel = SessionKernel(run, aliases, session_of(segment, graph, types, cache, run.rows))
    return CompiledRun(run, aliases, kernel, views)


class SessionKernel:
    """A run by a session with an open length, bound once for all tiles while memory stays the same."""

    def __init__(self, run: ElementwiseRun, aliases: Mapping[str, str], session: tuple[tuple[str, ...], Any]) -> None:
        self.inputs, self._session = session
        self._rows, self._length = run.rows, run.length
        # The runtime does not see when an operand is still read: results that overwrite one go through a tile.
        self._scratch = {name: np.empty(TILE, numpy_dtype(run.types[name].dtype)) for name in aliases}
        self._bound: list[_TileBindings] = []

    def run(self, values: Mapping[str, Value], results: Mapping[str, Value]) -> None:
        bound_values = [*(values[name] for name in self.inputs), *results.values()]
        bound = next(
            (bindings for bindings in self._bound if all(a is b for a, b in zip(bindings.given, bound_values))), None
        )
        if bound is None:
            bound = _TileBindings(bound_values, list(self._tiles(values, results)))
            # Two, for states that alternate; not of memory that holds another value in the next step.
            self._bound = [bound, *self._bound[:1]] if all(value.persistent for value in bound_values) else self._bound
        for start, binding in bound.tiles:
            run_bound(self._session, binding)
            for name, scratch in self._scratch.items():
                size = min(TILE, self._length - start)
                results[name].array.reshape(-1)[start : start + size] = scratch[:size]

    def _tiles(self, values: Mapping[str, Value], results: Mapping[str, Value]) -> Iterator[tuple[int, Any]]:
        for start in range(0, self._length, TILE):
            size = min(TILE, self._length - start)
            binding = self._session.io_binding()
            for name in self.inputs:
                if name in self._rows:
                    bind_memory(binding.bind_input, name, values[name].array.reshape(-1)[start : start + size])
                else:
                    binding.bind_ortvalue_input(name, values[name].given)
            for name, value in results.items():
                scratch = self._scratch.get(name)
                tile = value.array.reshape(-1)[start : start + size] if scratch is None else scratch[:size]
                bind_memory(binding.bind_output, name, tile)
            yield start, binding


@dataclass(frozen=True, slots=True)
class _TileBindings:
    """The bindings of all tiles to these values, each with the index of the first element."""

    given: list[Value]
    tiles: Sequence[tuple[int, Any]]
