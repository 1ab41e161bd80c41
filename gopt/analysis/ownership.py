"""Assigns each value of an update to its parameter, in one sweep over the nodes."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.ir.graph import COMM, Graph, Node


class Ownership:
    """The owner, a parameter, of each value.

    ``full``: owners of full-shaped values; of several, the first. ``reduced``: owners of values that are reductions of
    full-shaped ones; '' where several parameters take part, or where a call completes the reduction.
    """

    def __init__(self, graph: Graph, full: Mapping[str, str]) -> None:
        self._types = graph.types
        self.full = dict(full)
        self.reduced: dict[str, str] = {}

    def of(self, node: Node) -> list[str]:
        """The owners of the full-shaped values that a node reads, in the order of its operands."""
        full = self.full
        owners = [full[name] for name in node.reads if name in full]
        return list(dict.fromkeys(owners)) if len(owners) > 1 else owners

    def note(self, node: Node) -> list[str]:
        """Assign an owner to the outputs of a node, and return ``of(node)``; nodes come in topological order."""
        owners = self.of(node)
        behind = owners or [*{self.reduced[name] for name in node.reads if name in self.reduced}]
        if not behind:
            return owners
        call = node.domain == COMM and not owners  # made by every rank
        only = behind[0] if len(behind) == 1 and not call else ""
        for name in node.outputs:
            type = self._types.get(name)
            if name and owners and (type is None or type.elements != 1):
                self.full[name] = owners[0]
            elif name:
                self.reduced[name] = only
        return owners
