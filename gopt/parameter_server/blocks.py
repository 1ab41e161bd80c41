"""The block of each key: what an asynchronous server runs when a trainer pushes the key.

A block is cut out of the server's graph by data flow, in two parts. ``update`` makes the key's states from what was
pushed, its states as they are, and the counters as they are held. ``counter`` makes the next counters. A counter is a
state whose new value depends on no gradient, neither in this step nor through another state: a step number, or the
state of a schedule.

Each key has its own copy of every counter that it reads. A push sees the counters after as many advances as the
manifest's rule ``count`` gives for the pushes of its key that were accepted before it:

- ``round``: their number divided by the number of trainers, rounded down. A schedule then means what it means in sync.
- ``push``: their number.
- ``chief``: the number of them that trainer 0 sent.

A hyper-parameter that is fed is the one of that number, as if it were the number of the round. With one trainer all
three are the number of the round in sync, so that the same operators see the same values.

A server's part of a table is such a key too: what is pushed of it are rows and their numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gopt.artifact.server_entries import KeyEntry, KeyKind, ServerPlanEntry
from gopt.errors import InvariantError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.tensor import Tensor
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class TablePart:
    """A server's part of a table in the manifest: numbers and gradients of pushed rows, and states before and after the
    update."""

    name: str
    ids: str
    gradient: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The graphs a server runs for one key. ``key``: its index in the manifest's keys, or in the tables.

    ``pushed``: the input of ``update`` taking the pushed value. ``states``: input -> output of the states that
    ``update`` changes, the parameter first; ``counters``: the same for ``counter``. ``backup``: the input taking the
    parameter as the trainer pulled it, '' without delay compensation. ``hyper``: the hyper-parameters that one of the
    graphs reads. ``counter`` is None where the key has no counters.
    """

    key: int
    entry: KeyEntry | TablePart
    update: Graph
    counter: Graph | None
    pushed: str
    states: dict[str, str]
    counters: dict[str, str]
    hyper: tuple[str, ...]
    backup: str = ""

    def __repr__(self) -> str:
        return f"<Block of {self.entry.name}: {len(self.update.nodes)} nodes, {len(self.counters)} counters>"


def find_blocks(
    graph: Graph, plan: ServerPlanEntry, server: int, states: Mapping[str, str], hyper: Collection[str]
) -> list[Block]:
    """Return the blocks of all keys of a server, in the manifest's order, and then of its parts of tables.

    ``graph``: the server's, as loaded; ``states``: of the server, input -> output; ``hyper``: inputs that are fed.
    Linear in the graph as far as blocks share no nodes. Raises UnsupportedError for a key not updated by itself,
    InvariantError where graph and manifest do not match.
    """
    served = [
        (number, key) for number, key in enumerate(plan.keys)
        if key.kind is KeyKind.PARAMETER and key.server in (None, server)
    ]  # fmt: skip
    for _, key in served:
        if key.server is None:
            raise UnsupportedError(
                f"{show(key.name)} is updated on every server: without rounds its copies would diverge", _SYNC
            )
        if not key.gradient:
            raise UnsupportedError(f"{show(key.name)} shares its gradient with another parameter", _SYNC)
    keys: list[tuple[int, KeyEntry | TablePart]] = [*served, *_parts(plan, server)]
    return _Cutter(graph, keys, states, hyper).blocks()


def _parts(plan: ServerPlanEntry, server: int) -> list[tuple[int, TablePart]]:
    parts = []
    for number, table in enumerate(plan.tables):
        if server in table.servers:
            position = table.servers.index(server)
            states = table.states[position]
            part = TablePart(
                table.parameter, table.ids[position], table.gradients[position], states.inputs, states.outputs
            )  # fmt: skip
            parts.append((number, part))
    return parts


def _pushed(key: KeyEntry | TablePart) -> tuple[str, ...]:
    """Return the pushed values of a key, under the names in the graph."""
    return (key.ids, key.gradient) if isinstance(key, TablePart) else (key.gradient,)


_SYNC = "take --mode sync"


@dataclass(slots=True)
class _Cut:
    """The nodes of a key, by id: of the update, of the counters, and of both."""

    number: int
    key: KeyEntry | TablePart
    own: dict[str, str]
    nodes: set[int]
    read: set[str]
    counted: set[str] = field(default_factory=set)
    counting: set[int] = field(default_factory=set)
    backup: str = ""
    """The value that the trainer had pulled, where the update reads it."""


class _Cutter:
    def __init__(
        self, graph: Graph, keys: Sequence[tuple[int, KeyEntry | TablePart]], states: Mapping[str, str],
        hyper: Collection[str],
    ) -> None:  # fmt: skip
        self.graph, self.keys, self.states, self.hyper = graph, keys, states, frozenset(hyper)
        self.index = GraphIndex(graph)
        self._node = {id(node): node for node in graph.nodes}
        self.gradients = {name: key.name for _, key in keys for name in _pushed(key)}
        self._pulled = self._pulled_values()
        self._made = {output: input for input, output in states.items()}
        self._check(keys)
        self.counts = self._counters()
        self.owners = {name: key.name for _, key in keys for name in key.inputs if name not in self.counts}

    def _check(self, keys: Sequence[tuple[int, KeyEntry | TablePart]]) -> None:
        for _, key in keys:
            if not self.graph.types.keys() >= {*_pushed(key)} or len(key.inputs) != len(key.outputs) or not key.inputs:
                raise InvariantError(f"the server's graph does not have key {key.name!r} as the manifest lists it")
            for name, new in zip(key.inputs, key.outputs):
                if self.states.get(name) != new or name not in self.graph.inputs:
                    raise InvariantError(f"state {name!r} of key {key.name!r} is not in the server's graph")

    def _pulled_values(self) -> dict[str, str]:
        """Pushed value -> the value of the key as the trainer pulled it, where servers compensate delays."""
        calls = [node for node in self.graph.nodes if node.domain == COMM]
        pulled = {node.attributes["bucket"]: node.outputs for node in calls if node.op_type == "Pulled"}
        return {
            pushed: before
            for node in calls if node.op_type == "Aggregate"
            for pushed, before in zip(node.outputs, pulled.get(node.attributes["bucket"], ()))
        }  # fmt: skip

    def _counters(self) -> frozenset[str]:
        """Return the states no gradient changes: all except those reachable from messages, also through other
        states."""
        messages = (name for node in self.graph.nodes if node.domain == COMM for name in node.outputs)
        reached = set(walk(messages, lambda name: (*self.index.results(name), self._made.get(name, ""))))
        return frozenset(name for name in self.states if name not in reached)

    def blocks(self) -> list[Block]:
        """Cut out all keys. Unread counters belong to the first key."""
        lost = [name for name in self.states if name not in self.counts and name not in self.owners]
        if lost:
            raise UnsupportedError(f"state {show(lost[0])} follows gradients, and belongs to no parameter", _SYNC)
        cuts = [self._cut(number, key) for number, key in self.keys]
        idle = self.counts.difference(*(cut.counted for cut in cuts))
        for cut in cuts[:1]:
            self._count(cut, idle)
        return [self._block(cut) for cut in cuts]

    def _cut(self, number: int, key: KeyEntry | TablePart) -> _Cut:
        results = {name: new for name, new in zip(key.inputs, key.outputs) if name not in self.counts}
        if key.inputs[0] not in results:
            raise InvariantError(f"no gradient changes key {key.name!r}")
        pulled = self._pulled.get(key.gradient, "")
        nodes, read = self._walk(key, results.values(), (*_pushed(key), pulled))
        changed = {name for name in read if name in self.states and name not in self.counts and name not in results}
        if changed:
            name = min(changed)
            raise UnsupportedError(
                f"{show(key.name)} is updated with state {show(name)} of {show(self.owners[name])}", _SYNC
            )
        cut = _Cut(number, key, results, nodes, read, backup=pulled)
        self._count(cut, {name for name in (*key.inputs, *read) if name in self.counts})
        return cut

    def _count(self, cut: _Cut, names: Collection[str]) -> None:
        """Add counters to a key, with the counters behind their next values."""
        pending = set(names) - cut.counted
        while pending:
            cut.counted |= pending
            nodes, read = self._walk(cut.key, [self.states[name] for name in pending], ())
            cut.counting |= nodes
            cut.read |= read
            pending = {name for name in read if name in self.counts} - cut.counted

    def _block(self, cut: _Cut) -> Block:
        counters = {name: new for name, new in self.states.items() if name in cut.counted}
        update = self._part(cut.own, cut.nodes, (*_pushed(cut.key), *filter(None, [cut.backup])))
        counter = self._part(counters, cut.counting, ()) if counters else None
        hyper = tuple(name for name in self.graph.inputs if name in self.hyper and name in cut.read)
        return Block(cut.number, cut.key, update, counter, cut.key.gradient, cut.own, counters, hyper, cut.backup)

    def _walk(
        self, key: KeyEntry | TablePart, values: Iterable[str], pushed: Collection[str]
    ) -> tuple[set[int], set[str]]:  # fmt: skip
        """Return the nodes behind some values, by id, and the read values made by no node. The walk stops at
        ``pushed``."""
        nodes: set[int] = set()
        read: set[str] = set()
        stack = list(values)
        while stack:
            name = stack.pop()
            if name in pushed:
                continue
            node = self.index.producers.get(name)
            if node is None:
                read.add(name)
                continue
            if node.domain == COMM:
                raise UnsupportedError(f"{show(key.name)} is updated with {self._what(node, name)}", _SYNC)
            if id(node) not in nodes:
                nodes.add(id(node))
                stack += node.reads
        return nodes, read

    def _what(self, node: Node, name: str) -> str:
        if name in self.gradients:
            return f"the gradient of {show(self.gradients[name])}"
        return f"{show(name)}, for which servers wait for one another" if node.op_type == "AllReduce" else show(name)

    def _part(self, results: dict[str, str], ids: set[int], names: Sequence[str]) -> Graph:
        """Return a graph of some nodes. The inputs are pushed values, states, and fed values."""
        graph, position = self.graph, self.index.position
        nodes = sorted((self._node[key] for key in ids), key=lambda node: position[id(node)])
        read = {name for node in nodes for name in node.reads} | set(results.values()) | set(results)
        named = [name for name in graph.inputs if name in read and (name in self.states or name in self.hyper)]
        inputs = {name: graph.types[name] for name in names} | {name: graph.inputs[name] for name in named}
        constants: dict[str, Tensor] = {
            name: graph.initializers[name] for name in read if name in graph.initializers and name not in self.states
        }
        defined = inputs.keys() | constants.keys() | {name for node in nodes for name in node.outputs}
        lost = sorted(name for name in read if name and name not in defined)
        if lost:
            raise InvariantError(f"a block reads {lost[0]!r}, which the server's graph does not have")
        outputs = {name: graph.outputs[name] for name in results.values()}
        return Graph(graph.name, nodes, inputs, outputs, constants, graph.types, graph.header)
