"""Match the nodes of two graphs, whatever their inner values are called."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from gopt.analysis.isomorphism import signature
from gopt.ir.graph import Graph, Node
from gopt.offline.text import digest


class ComparedGraph:
    """A graph with the tables that matching needs."""

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
    """Which node of ``a`` is which node of ``b``. Every step is linear in the graphs.

    Equal structure is matched first (each node numbered by its operator, attributes and operands), then what hangs at
    the graph's outputs, then what reads the same values, then equal names. What is left was removed or added.
    """

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
        """Return whether a node of ``a`` is matched to a node that computes the same value."""
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

    def _join(self, first: Node, second: Node) -> None:
        self.match[id(first)], self.back[id(second)] = second, first
        for name, other in zip(first.outputs, second.outputs):
            if name and other:
                self.value.setdefault(name, other)

    def _by_structure(self) -> None:
        """Match nodes that compute the same value, in order where there are several."""
        table: dict[Hashable, int] = {}
        queues: dict[int, list[Node]] = {}
        for node, number in _numbers(self.a, table):
            queues.setdefault(number, []).append(node)
        for queue in queues.values():
            queue.reverse()
        for node, number in _numbers(self.b, table):
            queue = queues.get(number, [])
            if queue:
                first = queue.pop()
                self._join(first, node)
                self._equal.add(id(first))

    def _from_readers(self) -> None:
        """Match the producers of operands of matched nodes."""
        while self._work:
            name, other = self._work.pop()
            first, second = self.a.producers.get(name), self.b.producers.get(other)
            if first is None or second is None or id(first) in self.match or id(second) in self.back:
                continue
            if same_signature(first, second) and first.outputs.index(name) == second.outputs.index(other):
                self._join(first, second)
                self._work.extend(zip(reversed(first.inputs), reversed(second.inputs)))

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
        others = {next((x for x in node.outputs if x), ""): node for node in self.b.open(self.back)}
        for node in self.a.open(self.match):
            other = others.get(next((x for x in node.outputs if x), ""))
            if other is None or id(other) in self.back:
                continue
            if same_signature(node, other) or not same_operator:
                self._join(node, other)
                self._work.extend(zip(node.inputs, other.inputs))
                self._from_readers()

    def _pair_constants(self) -> None:
        """Constants at the same operand of matched nodes whose values differ; one pair for each."""
        taken: set[str] = set()
        for node in self.a.graph.nodes:
            other = self.match.get(id(node))
            if other is None or id(node) in self._equal:
                continue
            for name, new in zip(node.inputs, other.inputs):
                if name not in self.a.constants or new not in self.b.constants or name in self.changed:
                    continue
                if self.a.constant(name) != self.b.constant(new) and (new not in taken or name == new):
                    self.changed[name] = new
                    taken.add(new)
        for name in self.a.constants:
            unread = name in self.b.constants and name not in self.changed and name not in taken
            if unread and self.a.constant(name) != self.b.constant(name) and self._same_readers(name):
                self.changed[name] = name

    def _same_readers(self, name: str) -> bool:
        """Return whether a constant is an output, or read by nothing, in both graphs:
        no operand shows its change."""
        return name in self.a.graph.outputs and name in self.b.graph.outputs

    def same(self, name: str, other: str) -> bool:
        """Return whether operands of ``a`` and ``b`` are matched values, or constants whose change has its own
        line."""
        if not name or not other:
            return name == other
        if name in self.a.constants and other in self.b.constants:
            return self.changed.get(name) == other or self.a.constant(name) == self.b.constant(other)
        return self.value.get(name) == other

    def renamed(self) -> int:
        """Matched inner values with different names."""
        outputs = {*self.a.graph.outputs, *self.b.graph.outputs}
        return sum(name != other and not {name, other} & outputs for name, other in self.value.items())


def same_signature(first: Node, second: Node) -> bool:
    return first.op_type == second.op_type and domain(first) == domain(second)


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
