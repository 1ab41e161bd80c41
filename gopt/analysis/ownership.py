"""Whose the values of an update are: told node by node, by whoever sweeps over it."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.ir.graph import COMM, Graph, Node


class Ownership:
    """Values by the parameter whose they are.

    ``wide``: full-shaped ones, each its first owner's. ``reduced``: what was made of them by reduction alone, '' where
    it is of several parameters, or completed by a call.
    """

    def __init__(self, graph: Graph, wide: Mapping[str, str]) -> None:
        self._graph = graph
        self.wide = dict(wide)
        self.reduced: dict[str, str] = {}

    def of(self, node: Node) -> list[str]:
        """The parameters whose full-shaped values a node reads, in the order of its operands."""
        return list(dict.fromkeys(self.wide[name] for name in node.reads if name in self.wide))

    def note(self, node: Node) -> list[str]:
        """Learn whose the outputs of a node are; nodes come in order. Returns ``of`` it."""
        owners = self.of(node)
        behind = owners or [*{self.reduced[name] for name in node.reads if name in self.reduced}]
        if not behind:
            return owners
        call = node.domain == COMM and not owners  # made by every rank
        only = behind[0] if len(behind) == 1 and not call else ""
        for name in filter(None, node.outputs):
            if owners and self._graph.type_of(name).elements != 1:
                self.wide[name] = owners[0]
            else:
                self.reduced[name] = only
        return owners
