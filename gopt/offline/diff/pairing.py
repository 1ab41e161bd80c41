"""Match the nodes of two graphs, whatever the names of inner values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from gopt.analysis.isomorphism import signature
from gopt.ir.graph import Graph, Node
from gopt.offline.text import digest


class ComparedGraph:
    """A graph with tables for matching."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.constants = {name: t for name, t in graph.initializers.items() if name not in graph.inputs}
        self._keys: dict[str, Hashable] = {}

    def constant(self, name: str) -> Hashable:
        """The content of a constant."""
        if name not in self._keys:
            tensor = self.constants[name]
            self._keys[name] = ("constant", str(tensor.type), digest(tensor) if tensor.type.static else name)
        return self._keys[name]

    def open(self, done: Mapping[int, Node]) -> list[Node]:
        return [node for node in self.graph.nodes if id(node) not in done]


class Pairing:
    """The match between nodes of ``a`` and nodes of ``b``. Every step is linear in the graphs.

    Equal structure is matched first (each node numbered by operator, attributes and operands), then the makers of the
    graph's outputs, then readers of the same values, then equal names. Unmatched nodes were removed or added."""

    def __init__(self, a: Graph, b: Graph) -> None:
        self.a, self.b = ComparedGraph(a), ComparedGraph(b)
        self.match: dict[int, Node] = {}
        self.back: dict[int, Node] = {}
        self.value: dict[str, str] = {name: name for name in a.inputs if name in b.inputs}
        self.changed: dict[str, str] = {}
        """Constants of ``a`` that have another value in ``b`` -> their name there."""
        self._equal: set[int] = set()
        self._work: list[tuple[str, str]] = []
        self._match()

    def equal(self, node: Node) -> bool:
        """Return whether a node of ``a`` is matched to a node with the same value."""
        return id(node) in self._equal

    def _match(self) -> None:
        self._by_structure()
        self._work = [(name, name) for name in self.a.graph.outputs if name in self.b.graph.outputs]
        self._from_readers()
        for _ in range(2):
            self._from_operands()
            self._by_name(same_operator=True)
        self._by_name(same_operator=False)
        self._from_operands()
        self._pair_constants()

    def _join(self, node: Node, twin: Node) -> None:
        self.match[id(node)], self.back[id(twin)] = twin, node
        for name, partner in zip(node.outputs, twin.outputs):
            if name and partner:
                self.value.setdefault(name, partner)

    def _by_structure(self) -> None:
        """Match nodes with the same value, in order if several."""
        table: dict[Hashable, int] = {}
        queues: dict[int, list[Node]] = {}
        for node, number in _numbers(self.a, table):
            queues.setdefault(number, []).append(node)
        for queue in queues.values():
            queue.reverse()
        for node, number in _numbers(self.b, table):
            queue = queues.get(number, [])
            if queue:
                twin = queue.pop()
                self._join(twin, node)
                self._equal.add(id(twin))

    def _from_readers(self) -> None:
        """Match the producers of operands of matched nodes."""
        while self._work:
            name, partner = self._work.pop()
            node, twin = self.a.producers.get(name), self.b.producers.get(partner)
            if node is None or twin is None or id(node) in self.match or id(twin) in self.back:
                continue
            if same_signature(node, twin) and node.outputs.index(name) == twin.outputs.index(partner):
                self._join(node, twin)
                self._work.extend(zip(reversed(node.inputs), reversed(twin.inputs)))

    def _from_operands(self) -> None:
        """Match the readers of matched operands."""
        waiting: dict[Hashable, list[Node]] = {}
        for node in self.b.open(self.back):
            key = self._operands(node, self.b, None)
            if key is not None:
                waiting.setdefault(key, []).append(node)
        for queue in waiting.values():
            queue.reverse()
        for node in self.a.open(self.match):
            key = self._operands(node, self.a, self.value)
            queue = waiting.get(key, [])
            while queue and id(queue[-1]) in self.back:
                queue.pop()
            if key is not None and queue:
                self._join(node, queue.pop())
        self._from_readers()

    def _operands(self, node: Node, index: ComparedGraph, names: Mapping[str, str] | None) -> Hashable:
        keys: list[Hashable] = []
        for name in node.reads:
            if name in index.constants:
                keys.append(index.constant(name))
            elif names is None:
                keys.append(name)
            elif name in names:
                keys.append(names[name])
            else:
                return None
        return (node.domain, node.op_type, len(node.outputs), tuple(keys))

    def _by_name(self, *, same_operator: bool) -> None:
        by_output = {next((x for x in node.outputs if x), ""): node for node in self.b.open(self.back)}
        for node in self.a.open(self.match):
            partner = by_output.get(next((x for x in node.outputs if x), ""))
            if partner is None or id(partner) in self.back:
                continue
            if same_signature(node, partner) or not same_operator:
                self._join(node, partner)
                self._work.extend(zip(node.inputs, partner.inputs))
                self._from_readers()

    def _pair_constants(self) -> None:
        """Constants with unequal values at the same operand of matched nodes; one pair for each."""
        used: set[str] = set()
        for node in self.a.graph.nodes:
            partner = self.match.get(id(node))
            if partner is None or id(node) in self._equal:
                continue
            for name, new in zip(node.inputs, partner.inputs):
                if name not in self.a.constants or new not in self.b.constants or name in self.changed:
                    continue
                if self.a.constant(name) != self.b.constant(new) and (new not in used or name == new):
                    self.changed[name] = new
                    used.add(new)
        for name in self.a.constants:
            unread = name in self.b.constants and name not in self.changed and name not in used
            if unread and self.a.constant(name) != self.b.constant(name) and self._same_readers(name):
                self.changed[name] = name

    def _same_readers(self, name: str) -> bool:
        """Return whether a constant is an output, or unread, in both graphs: no operand shows a change."""
        return name in self.a.graph.outputs and name in self.b.graph.outputs

    def same(self, name: str, partner: str) -> bool:
        """Return whether operands of ``a`` and ``b`` are matched values, or constants with a separate line for the
        change."""
        if not name or not partner:
            return name == partner
        if name in self.a.constants and partner in self.b.constants:
            return self.changed.get(name) == partner or self.a.constant(name) == self.b.constant(partner)
        return self.value.get(name) == partner

    def renamed(self) -> int:
        """Matched inner values with different names."""
        outputs = {*self.a.graph.outputs, *self.b.graph.outputs}
        return sum(name != partner and not {name, partner} & outputs for name, partner in self.value.items())


def same_signature(old: Node, new: Node) -> bool:
    return old.op_type == new.op_type and domain(old) == domain(new)


def domain(node: Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _numbers(index: ComparedGraph, table: dict[Hashable, int]) -> Iterator[tuple[Node, int]]:
    """A number for each node, equal for nodes of the same operator, attributes and operands."""
    values: dict[str, Hashable] = {name: ("input", name) for name in index.graph.inputs}
    values[""] = None
    for node in index.graph.nodes:
        for name in node.reads:
            if name not in values:
                values[name] = index.constant(name)
        key = (signature(node), tuple(values[name] for name in node.inputs), tuple(map(bool, node.outputs)),
               tuple(values[name] for name in node.captures))  # fmt: skip
        number = table.setdefault(key, len(table))
        values.update((name, (number, slot)) for slot, name in enumerate(node.outputs) if name)
        yield node, number
