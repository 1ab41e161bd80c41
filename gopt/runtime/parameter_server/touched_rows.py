"""Tables with updates on touched rows: a server keeps the whole table outside the graph.

In the file, rows of a table are gathered, updated and scattered into the whole; the graph as such would copy the whole
in every round. Here the graph takes rows and returns new ones, and the server writes them into the table: the time of a
round depends on the number of touched rows, not on the size of the table."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node
from gopt.records.row_init import RowInit
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class TouchedState:
    """A state of a part of a table. ``rows``, ``updated``: the graph's names of touched rows before and after the
    update."""

    input: str
    output: str
    rows: str
    updated: str


def take_out(graph: Graph, states: Mapping[str, str]) -> tuple[Graph, list[TouchedState]]:
    """Return a graph on the ``rows`` of some states instead of whole parts, with the updated rows as outputs, and the
    states. No node makes ``rows``. ``states``: input -> output.

    Raises InputError where a state is not gathered once and scattered back.
    """
    users: dict[str, list[Node]] = {}
    producers = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        for name in node.reads:
            users.setdefault(name, []).append(node)
    touched: list[TouchedState] = []
    gone: set[int] = set()
    for name, output in states.items():
        nodes = _way(name, output, users, producers)
        if nodes is None:
            raise InputError(f"the server's graph does not update rows of {name!r} alone", "split again")
        (_, gather, put, _) = nodes
        touched.append(TouchedState(name, output, gather.outputs[0], put.inputs[2]))
        gone.update(map(id, nodes))
    outputs = {name: type for name, type in graph.outputs.items() if name not in states.values()}
    outputs |= {state.updated: graph.types[state.updated] for state in touched}
    inputs = {name: type for name, type in graph.inputs.items() if name not in states}
    used, needed = set(outputs), []
    for node in reversed(graph.nodes):
        if id(node) not in gone and (node.domain == COMM or not used.isdisjoint(node.outputs)):
            needed.append(node)
            used.update(node.reads)
    initializers = {name: tensor for name, tensor in graph.initializers.items() if name not in states}
    return replace(graph, nodes=needed[::-1], inputs=inputs, outputs=outputs, initializers=initializers), touched


def _way(
    name: str, output: str, users: Mapping[str, list[Node]], producers: Mapping[str, Node]
) -> tuple[Node, Node, Node, Node] | None:
    """The nodes Reshape, Gather, ScatterND and Reshape on a state's rows; None where the state is used otherwise."""
    last = producers.get(output)
    gathered = users.get(name, [])
    if last is None or not last.is_a("Reshape") or len(gathered) != 1 or not gathered[0].is_a("Reshape"):
        return None
    put, readers = producers.get(last.inputs[0]), users.get(gathered[0].outputs[0], [])
    gathers = [node for node in readers if node.is_a("Gather")]
    if put is None or not put.is_a("ScatterND") or len(gathers) != 1 or len(readers) != 2 or put not in readers:
        return None
    return (gathered[0], gathers[0], put, last) if put.inputs[0] == gathered[0].outputs[0] else None


@dataclass(frozen=True, slots=True)
class RowSource:
    """Makes the first values of rows of a part with ``count`` rows.

    Local row i is row first + i step of the table. Rows of the table have ``width`` elements; the part has ``columns``
    of these."""

    init: RowInit
    tensor: str
    count: int
    first: int
    step: int
    width: int
    columns: slice
    dtype: np.dtype

    def rows(self, ids: Array) -> Array:
        """Rows by local indices, in ascending order."""
        rows: Array = self.init.rows(self.tensor, self.first + ids * self.step, self.width)[:, self.columns]
        return rows.astype(self.dtype)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Zeros in memory with small pages, allocated at the first touch. NumPy asks for pages of 2 MiB, so that a few rows
    would take as much memory as the whole."""
    memory = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


class RowStore:
    """Rows of a state of a part: an array, or rows created at the first touch."""

    def __init__(self, array: Array, source: RowSource | None = None) -> None:
        """``array``: rows x columns. With a ``source`` the rows are not created yet."""
        self.array, self.source = array, source
        self._made = None if source is None else _empty((len(array),), np.dtype(bool))

    @classmethod
    def drawn(cls, source: RowSource) -> RowStore:
        """Rows of a source, not created yet."""
        return cls(_empty((source.count, source.columns.stop - source.columns.start), source.dtype), source)

    def take(self, ids: Array) -> Array:
        """A copy of some rows."""
        self._make(ids)
        return self.array[ids]

    def put(self, ids: Array, rows: Array) -> None:
        """Replace rows."""
        self.array[ids] = rows

    def whole(self) -> Array:
        """All rows, flattened; untouched rows are created."""
        if self._made is not None:
            self._make(np.flatnonzero(~self._made))
            self._made = None
        return self.array.reshape(-1)

    def _make(self, ids: Array) -> None:
        if self._made is None or self.source is None:
            return
        new = np.unique(ids[~self._made[ids]])
        if new.size:
            for part in np.array_split(new, -(-new.size * self.source.width // _CHUNK)):
                self.array[part] = self.source.rows(part)
            self._made[new] = True


_CHUNK = 1 << 22
"""Elements that are made at a time."""


@dataclass(slots=True)
class TouchedTable:
    """A server's part of a table with updates on touched rows."""

    states: tuple[TouchedState, ...]
    stores: dict[str, RowStore]

    def take(self, ids: Array) -> dict[str, Array]:
        """The rows of all states, by the graph's names."""
        return {state.rows: self.stores[state.input].take(ids) for state in self.states}

    def put(self, ids: Array, results: Mapping[str, Array]) -> None:
        """Put updated rows back."""
        for state in self.states:
            self.stores[state.input].put(ids, results[state.updated])

    def arrays(self) -> dict[str, Array]:
        """All states, whole and flattened."""
        return {state.input: self.stores[state.input].whole() for state in self.states}
