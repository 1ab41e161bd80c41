"""Producers and users of the values of one graph."""

from __future__ import annotations

from functools import cached_property

from gopt.ir.graph import COMM, Graph, Node

_VIEWS = ("Cast", "Reshape", "Identity", "Slice", "Flatten")


class Wiring:
    """A graph with its nodes by label, the makers and the readers of its values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def labels(self) -> dict[str, Node]:
        return {node.label: node for node in self.graph.nodes}

    @cached_property
    def producers(self) -> dict[str, Node]:
        return self.graph.producers()

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        return self.graph.users()

    def sent_by(self, name: str) -> list[Node]:
        """Calls that a value goes into, also through casts and reshapes."""
        found, seen, todo = [], {name}, [name]
        while todo:
            for node in self.users.get(todo.pop(), ()):
                if node.domain == COMM:
                    found.append(node)
                elif node.op_type in _VIEWS:
                    new = [each for each in node.outputs if each not in seen]
                    seen.update(new)
                    todo += new
        return list(dict.fromkeys(found))

    def brought_by(self, name: str) -> list[Node]:
        """The call that a value comes out of, also through casts and reshapes."""
        seen: set[str] = set()
        while name not in seen and (node := self.producers.get(name)) is not None:
            if node.domain == COMM:
                return [node]
            if node.op_type not in _VIEWS:
                break
            seen.add(name)
            name = node.inputs[0]
        return []
