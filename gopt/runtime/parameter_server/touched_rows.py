"""Tables of which an update runs on touched rows: a server keeps them out of the graph that it runs.

In the file, rows of a table are gathered, updated and put back into the whole, which would be copied in every round.
Here the graph gets the rows and gives new ones, and the server puts them where they belong: a round costs as much as
rows were touched, however many the table has.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node
from gopt.parameter_server.row_init import RowInit
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class TouchedState:
    """A state of a part of a table: what the graph calls its touched rows before (``rows``) and after the update
    (``updated``)."""

    input: str
    output: str
    rows: str
    updated: str


def take_out(graph: Graph, states: Mapping[str, str]) -> tuple[Graph, list[TouchedState]]:
    """A graph that gives the updated rows of some states, and reads their ``rows``, which nothing in it makes, in place
    of whole parts. ``states``: input -> output.

    Raises InputError where a state is not gathered once and put back.
    """
    users: dict[str, list[Node]] = {}
    producers = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        for name in node.reads:
            users.setdefault(name, []).append(node)
    found: list[TouchedState] = []
    gone: set[int] = set()
    for name, output in states.items():
        nodes = _way(name, output, users, producers)
        if nodes is None:
            raise InputError(f"the server's graph does not update rows of {name!r} alone", "split again")
        (_, gather, put, _) = nodes
        found.append(TouchedState(name, output, gather.outputs[0], put.inputs[2]))
        gone.update(map(id, nodes))
    outputs = {name: type for name, type in graph.outputs.items() if name not in states.values()}
    outputs |= {each.updated: graph.types[each.updated] for each in found}
    inputs = {name: type for name, type in graph.inputs.items() if name not in states}
    used, kept = set(outputs), []
    for node in reversed(graph.nodes):
        if id(node) not in gone and (node.domain == COMM or not used.isdisjoint(node.outputs)):
            kept.append(node)
            used.update(node.reads)
    initializers = {name: tensor for name, tensor in graph.initializers.items() if name not in states}
    return replace(graph, nodes=kept[::-1], inputs=inputs, outputs=outputs, initializers=initializers), found


def _way(
    name: str, output: str, users: Mapping[str, list[Node]], producers: Mapping[str, Node]
) -> tuple[Node, Node, Node, Node] | None:
    """The nodes that take rows of a state out, and put them back; None where it is used otherwise."""
    last = producers.get(output)
    first = users.get(name, [])
    if last is None or not last.is_a("Reshape") or len(first) != 1 or not first[0].is_a("Reshape"):
        return None
    put, readers = producers.get(last.inputs[0]), users.get(first[0].outputs[0], [])
    gathers = [node for node in readers if node.is_a("Gather")]
    if put is None or not put.is_a("ScatterND") or len(gathers) != 1 or len(readers) != 2 or put not in readers:
        return None
    return (first[0], gathers[0], put, last) if put.inputs[0] == first[0].outputs[0] else None


@dataclass(frozen=True, slots=True)
class RowSource:
    """What makes rows of a part, which has ``count``. ``first`` and ``step``: local row i is row first + i step of the
    table, whose rows have ``width`` elements; the part has ``columns`` of them."""

    init: RowInit
    tensor: str
    count: int
    first: int
    step: int
    width: int
    columns: slice
    dtype: np.dtype

    def rows(self, ids: Array) -> Array:
        """Rows by their local numbers, in ascending order."""
        rows: Array = self.init.rows(self.tensor, self.first + ids * self.step, self.width)[:, self.columns]
        return rows.astype(self.dtype)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Zeros in memory of which the machine gives a small page when it is touched. NumPy asks for pages of 2 MiB: a row
    here and there would take as much as the whole."""
    memory = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


class RowStore:
    """Rows of a state of a part: an array, or rows that are made when they are first touched."""

    def __init__(self, array: Array, source: RowSource | None = None) -> None:
        """``array``: rows x columns; with a ``source`` its rows are not made yet."""
        self.array, self.source = array, source
        self._made = None if source is None else _empty((len(array),), np.dtype(bool))

    @classmethod
    def drawn(cls, source: RowSource) -> RowStore:
        """Rows of a source, of which none is made yet."""
        return cls(_empty((source.count, source.columns.stop - source.columns.start), source.dtype), source)

    def take(self, ids: Array) -> Array:
        """A copy of some rows."""
        self._make(ids)
        return self.array[ids]

    def put(self, ids: Array, rows: Array) -> None:
        """Replace rows that were taken before."""
        self.array[ids] = rows

    def whole(self) -> Array:
        """All rows, flattened; those that nobody touched are made."""
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
    """A server's part of a table whose rows are updated when they are touched."""

    states: tuple[TouchedState, ...]
    stores: dict[str, RowStore]

    def take(self, ids: Array) -> dict[str, Array]:
        """The rows of all states, as the graph calls them."""
        return {each.rows: self.stores[each.input].take(ids) for each in self.states}

    def put(self, ids: Array, made: Mapping[str, Array]) -> None:
        """Put updated rows back."""
        for each in self.states:
            self.stores[each.input].put(ids, made[each.updated])

    def arrays(self) -> dict[str, Array]:
        """All states, whole and flattened."""
        return {each.input: self.stores[each.input].whole() for each in self.states}
