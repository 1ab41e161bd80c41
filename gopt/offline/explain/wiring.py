"""The calls that receive a value, and the call that produces the value."""

from __future__ import annotations

from functools import cached_property

from gopt.ir.graph import COMM, Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.operators.kinds import RELAYS


class Wiring(GraphIndex):
    """A graph with nodes by label, and the calls reached by values."""

    @cached_property
    def labels(self) -> dict[str, Node]:
        """Label -> node."""
        return {node.label: node for node in self.graph.nodes}

    def sent_by(self, name: str) -> list[Node]:
        """Calls that receive a value, also through casts and reshapes."""
        values = walk([name], lambda value: self.results(value, lambda node: node.op_type in RELAYS))
        users = (node for value in values for node in self.users.get(value, ()))
        return list(dict.fromkeys(node for node in users if node.domain == COMM))

    def brought_by(self, name: str) -> list[Node]:
        """The call that produces a value, also through casts and reshapes."""
        visited: set[str] = set()
        while name not in visited and (node := self.producers.get(name)) is not None:
            if node.domain == COMM:
                return [node]
            if node.op_type not in RELAYS:
                break
            visited.add(name)
            name = node.inputs[0]
        return []
