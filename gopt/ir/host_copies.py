"""Copies between the memory of a device and of the host, and the nodes of an update that run on the host.

A pure function of nodes and of a placement: the live peak, the time of a step and an engine read the same copies."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, TRANSFER, Node, clone
from gopt.ir.min_cut import SINK, SOURCE, Network
from gopt.ir.node_kinds import heavy
from gopt.operators.kinds import VIEWS
from gopt.records.placements import FULLY_REPLICATED, Sharding
from gopt.text.sanitize import show

HOST = "gopt.host"
"""Domain of the copies; never written."""
TO_HOST, TO_DEVICE = "ToHost", "ToDevice"
_HOSTED, _BACK = ".host", ".device"
"""Ends of the names of copies. A value with such a name would end with ``_MORE``."""
_ANY = float("inf")


@dataclass(frozen=True, slots=True)
class FileNodes:
    """Nodes of a file in order, with ``inputs`` and ``outputs``. Constants of the file are in neither."""

    nodes: Sequence[Node]
    inputs: Collection[str]
    outputs: Collection[str]


@dataclass(slots=True)
class CopiedStep:
    """The nodes with copies. ``on_host``: values in the memory of the host; ``original``: value of a copy, or of a view
    of a copy -> the value with equal elements."""

    nodes: list[Node]
    on_host: set[str] = field(default_factory=set)
    original: dict[str, str] = field(default_factory=dict)


def with_copies(
    step: FileNodes, states: Mapping[str, str], activations: Collection[str], nbytes: Callable[[str], int]
) -> CopiedStep:
    """Add copies to clones of the nodes of a rank. ``states``: input -> output of states on the host;
    ``activations``: of the forward; ``nbytes``: bytes of a value.

    Of the update, readers and makers of host states run on the host, calls and products on the device, and others where
    the fewest bytes are copied. An activation is on the host during the longest row of nodes without a reader; views
    are made again. A copy to the device starts at the reader of the copy before. Calls keep their order.
    """
    copied = _Copies(step, states, _on_host(step, states, nbytes))
    copied.move_activations(activations)
    copied.cross_sides()
    return copied.finish()


def _on_host(step: FileNodes, states: Mapping[str, str], nbytes: Callable[[str], int]) -> set[int]:
    """The ids of the nodes on the host."""
    states = {state: new for state, new in states.items() if state in step.inputs}
    new = set(states.values())
    below, behind = set(states), set[int]()
    for node in step.nodes:
        if not below.isdisjoint(node.reads):
            below.update(node.outputs)
            behind.add(id(node))
    if not behind:
        return set()
    fixed, serves = set[str](), set[str]()
    free: list[Node] = []
    for node in reversed(step.nodes):
        of_device = node.domain == COMM or node.op_type == TRANSFER or heavy(node) or bool(node.captures)
        if of_device or (id(node) not in behind and not fixed.isdisjoint(node.outputs)):
            fixed.update(node.reads)
        elif node.inputs and (id(node) in behind or not serves.isdisjoint(node.outputs)):
            free.append(node)
            serves.update(node.reads)
    return _cut(step, free[::-1], states, new, nbytes)


def _cut(
    step: FileNodes, free: Sequence[Node], states: Mapping[str, str], new: Set[str], nbytes: Callable[[str], int]
) -> set[int]:
    """The free nodes behind a cut of the fewest bytes between the device's nodes, and readers and makers of states."""
    network = Network()
    vertex = {id(node): network.vertex() for node in free}
    producers = {name: vertex.get(id(node), SOURCE) for node in step.nodes if node.inputs for name in node.outputs}
    producers |= {name: SINK if name in states else SOURCE for name in step.inputs}
    readers: dict[str, set[int]] = {}
    for node in step.nodes:
        for name in node.reads:
            readers.setdefault(name, set()).add(vertex.get(id(node), SOURCE))
    for name in step.outputs:
        readers.setdefault(name, set()).add(SINK if name in new else SOURCE)
    for node in free:
        if any(name in states for name in node.reads) or not new.isdisjoint(node.outputs):
            network.edge(vertex[id(node)], SINK, _ANY)
    for name, positions in readers.items():
        maker = producers.get(name)
        if maker is None or maker == SINK or positions == {maker}:
            continue
        down, up, size = network.vertex(), network.vertex(), nbytes(name) + 1
        network.edge(maker, down, size)
        network.edge(up, maker, size)
        for position in sorted(positions - {maker}):
            network.edge(down, position, _ANY)
            network.edge(position, up, _ANY)
    hosted = network.behind_cut()
    return {id(node) for node in free if vertex[id(node)] in hosted}


class _Copies:
    """The nodes in the making. ``due``: id of a node -> the position in the order of the step."""

    def __init__(self, step: FileNodes, states: Mapping[str, str], hosted: Collection[int]) -> None:
        self.step = step
        self.nodes = [clone(node) for node in step.nodes]
        self.hosted = {id(copy) for copy, node in zip(self.nodes, step.nodes) if id(node) in hosted}
        self.due = {id(node): float(position) for position, node in enumerate(self.nodes)}
        self.states = {state: new for state, new in states.items() if state in step.inputs}
        self.result = CopiedStep([], set(self.states))
        self.added: list[Node] = []
        self._shardings: dict[str, Sharding] = {}
        """Value -> the ranks of the node behind, or of a reader."""
        for node in reversed(self.nodes):
            self._shardings.update(dict.fromkeys(node.reads, node.sharding))
        for node in self.nodes:
            self._shardings.update(dict.fromkeys(node.outputs, node.sharding))
        self._taken = {name for node in step.nodes for name in node.outputs} | set(step.inputs)

    # --- activations ---

    def move_activations(self, names: Collection[str]) -> None:
        """Move values of the forward to the host in between, or for the next file of the micro-batch."""
        if not names:
            return
        moved = _Uses(self.nodes, self.step, set(names))
        self.result.on_host.update(set(names).intersection(self.step.inputs))
        renamed: dict[str, str] = {}
        returns: list[tuple[int, int, str]] = []
        for name in sorted(moved.producers.keys() | moved.uses.keys()):
            positions, producer = moved.uses.get(name, []), moved.producers.get(name)
            if producer is None:  # of an earlier file
                returns.append((positions[0], -1, name))
            elif name in self.step.outputs:
                renamed[name] = self._name(name, _BACK)
                self._add(TO_HOST, renamed[name], name, max([producer, *positions]) + 0.3)
            elif positions:
                last, reader = max(pairwise([producer, *positions]), key=lambda pair: (pair[1] - pair[0], -pair[0]))
                if reader - last > 1:
                    returns.append((reader, last, name))
        before = -1.0
        for reader, last, name in sorted(returns):
            source = name if last < 0 else self._copy(TO_HOST, name, last + 0.3)
            due = reader - 0.4
            back = self._copy(TO_DEVICE, source, max(last + 0.4, before) if before >= 0 else due, name)
            before = due
            self._let_read(name, back, reader, moved)
        if renamed:
            for node in self.nodes:
                _rename(node, renamed)
        self.nodes = moved.without_unread_views(self.nodes)

    def _let_read(self, name: str, back: str, reader: int, moved: _Uses) -> None:
        """Let readers from a position on read a copy, and copies of the views."""
        positions = [position for position in moved.readers[name] if position >= reader]
        late = {output for position in positions for output in self.nodes[position].outputs if output in moved.views}
        names = {name: back} | {view: view for view in late if moved.roots[view] == name}
        for position in positions:
            node = self.nodes[position]
            for read in node.reads:
                if read in moved.views and read not in names and moved.roots[read] == name:
                    self._view_again(read, moved.views, names, position)
            _rename_reads(node, names)

    def _view_again(self, name: str, views: Mapping[str, Node], names: dict[str, str], position: int) -> None:
        """Make a view again, of the copy, for a node at a position."""
        chain = [name]
        while views[chain[-1]].inputs[0] not in names:
            chain.append(views[chain[-1]].inputs[0])
        for view in reversed(chain):
            node = views[view]
            copy = clone(node)
            copy.inputs = [names[node.inputs[0]], *node.inputs[1:]]
            names[view] = self._name(view, _BACK)
            copy.outputs = [names[view]]
            self.result.original[names[view]] = view
            self.due[id(copy)] = position - 0.2
            self.added.append(copy)

    # --- the update ---

    def cross_sides(self) -> None:
        """Copy results for readers on the other side. Raises UnsupportedError for a value read inside of a body."""
        if not self.states:
            return
        self._rename_outputs()
        on_host = self.result.on_host
        maker = {name: node for node in (*self.nodes, *self.added) for name in node.outputs}
        for node in self.nodes:
            if id(node) in self.hosted:
                on_host.update(node.outputs)
        twins: dict[str, str] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.reads):
                is_value = name in maker or name in self.step.inputs
                if not is_value or (name in on_host) is (id(node) in self.hosted):
                    continue
                if name in node.captures:
                    raise UnsupportedError(
                        f"a body of {node.op_type} reads {show(name)}, which would be copied to or from the host",
                        "leave the states that it follows out of --offload",
                    )
                if name not in twins:
                    twins[name] = self._cross(name, maker.get(name), self.due[id(node)] - 0.4)
                _rename_reads(node, {name: twins[name]})

    def _cross(self, name: str, maker: Node | None, first_use: float) -> str:
        """A copy of a value on the other side; a constant is made once more there."""
        if maker is not None and not maker.inputs and not maker.domain:
            return self._constant(maker, name)
        due = first_use if maker is None else self.due[id(maker)] + 0.3
        return self._copy(TO_DEVICE if name in self.result.on_host else TO_HOST, name, due)

    def _rename_outputs(self) -> None:
        """Rename and copy results made on the other side than the output."""
        new, names = set(self.states.values()), dict[str, str]()
        for node in self.nodes:
            hosted = id(node) in self.hosted
            for name in node.outputs:
                if name in self.step.outputs and hosted is not (name in new):
                    names[name] = self._name(name, _HOSTED if hosted else _BACK)
                    self._add(TO_DEVICE if hosted else TO_HOST, names[name], name, self.due[id(node)] + 0.3)
        for node in self.nodes if names else ():
            _rename(node, names)

    def _constant(self, node: Node, name: str) -> str:
        """Make a constant once more, for the other side."""
        copy = clone(node)
        copy.outputs = [self._name(name, _HOSTED)]
        self.result.original[copy.outputs[0]] = name
        self.result.on_host.add(copy.outputs[0])
        self.hosted.add(id(copy))
        self.due[id(copy)] = self.due[id(node)]
        self.added.append(copy)
        return copy.outputs[0]

    # --- nodes ---

    def _copy(self, op_type: str, name: str, due: float, of: str = "") -> str:
        result = self._name(of or name, _HOSTED if op_type == TO_HOST else _BACK)
        self._add(op_type, name, result, due)
        return result

    def _add(self, op_type: str, name: str, result: str, due: float) -> None:
        sharding = self._shardings.get(name) or self._shardings.get(result, FULLY_REPLICATED)
        node = Node(op_type, [name], [result], domain=HOST, sharding=sharding)
        self._shardings[result], original = sharding, self.result.original
        new, old = (name, result) if result in self.step.outputs else (result, name)
        original[new] = original.get(old, old)
        if op_type == TO_HOST:
            self.result.on_host.add(result)
        self.due[id(node)] = due
        self.added.append(node)

    def _name(self, name: str, end: str) -> str:
        while (name := name + end) in self._taken:
            pass
        self._taken.add(name)
        return name

    def finish(self) -> CopiedStep:
        """The nodes in order: of runnable nodes, first the device's by position, then the host's."""
        everything = sorted([*self.nodes, *self.added], key=lambda node: self.due[id(node)])
        self.result.nodes = _ordered(everything, self.hosted) if self.hosted else everything
        return self.result


class _Uses:
    """Makers and readers of some values. A view is no reader, and readers of views are readers of the owner.

    ``producers``: value -> position; ``uses``: positions of readers, in order; ``readers``: with views."""

    def __init__(self, nodes: Sequence[Node], step: FileNodes, names: Set[str]) -> None:
        self.views = {
            node.outputs[0]: node for node in nodes
            if node.is_in(VIEWS) and node.outputs[0] not in step.outputs and node.outputs[0] not in names
        }  # fmt: skip
        self.roots: dict[str, str] = {}
        self.producers: dict[str, int] = {}
        self.uses: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        for position, node in enumerate(nodes):
            self.producers.update((name, position) for name in node.outputs if name in names)
            roots = dict.fromkeys(self.roots.get(name, name) for name in node.reads)
            is_view = node.outputs and node.outputs[0] in self.views
            if is_view:
                self.roots[node.outputs[0]] = self.roots.get(node.inputs[0], node.inputs[0])
            for name in names & roots.keys():
                self.readers.setdefault(name, []).append(position)
                if not is_view or name != self.roots[node.outputs[0]]:
                    self.uses.setdefault(name, []).append(position)

    def without_unread_views(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, without views without a reader."""
        read, result = set[str](), []
        for node in reversed(nodes):
            if not node.outputs or node.outputs[0] not in self.views or node.outputs[0] in read:
                result.append(node)
                read.update(node.reads)
        return result[::-1]


def _rename(node: Node, names: Mapping[str, str]) -> None:
    _rename_reads(node, names)
    node.outputs = [names.get(name, name) for name in node.outputs]


def _rename_reads(node: Node, names: Mapping[str, str]) -> None:
    node.inputs = [names.get(name, name) for name in node.inputs]


def _ordered(nodes: Sequence[Node], hosted: Collection[int]) -> list[Node]:
    """A topological order with few changes of side. A call waits for all calls before."""
    producers = {name: position for position, node in enumerate(nodes) for name in node.outputs if name}
    waits = [{producers[name] for name in node.reads if name in producers} for node in nodes]
    calls = [position for position, node in enumerate(nodes) if node.domain == COMM]
    for before, after in pairwise(calls):
        waits[after].add(before)
    users: list[list[int]] = [[] for _ in nodes]
    for position, operands in enumerate(waits):
        for operand in operands:
            users[operand].append(position)
    missing = [len(operands) for operands in waits]
    ready: tuple[list[int], list[int]] = ([], [])
    for position, count in enumerate(missing):
        if not count:
            ready[id(nodes[position]) in hosted].append(position)
    order: list[Node] = []
    side = False
    while ready[0] or ready[1]:
        side = side if ready[side] else not side
        position = heapq.heappop(ready[side])
        order.append(nodes[position])
        for user in users[position]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready[id(nodes[user]) in hosted], user)
    return order
