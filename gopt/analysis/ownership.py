"""Assigns each value of an update to a parameter, in one sweep over the nodes."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.ir.graph import COMM, Graph, Node


class Ownership:
    """The owner, a parameter, of each value.

    ``full``: owners of full-shaped values; of several, the first. ``reduced``: owners of reductions of full-shaped
    values; '' where several parameters take part, or where a call completes the reduction."""

    def __init__(self, graph: Graph, full: Mapping[str, str]) -> None:
        self._types = graph.types
        self.full = dict(full)
        self.reduced: dict[str, str] = {}

    def of(self, node: Node) -> list[str]:
        """The owners of a node's full-shaped operands, in order."""
        owners = list(filter(None, map(self.full.get, node.inputs)))
        owners += filter(None, map(self.full.get, node.captures))
        return list(dict.fromkeys(owners)) if len(owners) > 1 else owners

    def note(self, node: Node) -> list[str]:
        """Assign an owner to the outputs of a node, and return ``of(node)``; nodes come in topological order."""
        owners = self.of(node)
        if owners:
            for name in node.outputs:
                type = self._types.get(name)
                if type is not None and type.elements == 1:
                    self.reduced[name] = owners[0] if len(owners) == 1 else ""
                elif name:
                    self.full[name] = owners[0]
        elif self.reduced:
            self._note_small(node)
        return owners

    def _note_small(self, node: Node) -> None:
        """Give a node's results the owner of the reductions read; '' for several owners or a call."""
        behind = {self.reduced[name] for name in node.reads if name in self.reduced}
        if behind:
            only = behind.pop() if len(behind) == 1 and node.domain != COMM else ""  # a call is made by every rank
            self.reduced.update((name, only) for name in node.outputs if name)
