"""The axes along which a graph is split already, while it is split along one more."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.sharding.placements import PARTS, Placement
from gopt.sharding.rules import Mismatch, Operand
from gopt.tensor_parallel.check import Checker, together
from gopt.tensor_parallel.mappings import beside


@dataclass(slots=True)
class OtherAxes:
    """The axes along which a graph is split already, while nodes are put in for one more. ``checkers``: by axis, with
    the placements of all values of the graph."""

    graph: Graph
    checkers: tuple[Checker, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(each.axis for each in self.checkers)

    def of(self, name: str) -> tuple[Placement, ...]:
        """The placements of a value along these axes."""
        return tuple(checker.of(name) for checker in self.checkers)

    def fit(self, placed: Iterable[tuple[str, Placement]]) -> bool:
        """Return whether values can be placed so along one more axis."""
        if not self.checkers:
            return True
        return all(
            together(each, other) for name, each in placed if name and isinstance(each, PARTS)
            for other in self.of(name) if isinstance(other, PARTS)
        )  # fmt: skip

    def adds(self, node: Node, placement: Placement) -> bool:
        """Return whether a mapping along one of these axes hands on what is placed so along the new one."""
        try:
            beside(node, Operand(node.inputs[0], placement))
        except Mismatch:
            return False
        return True

    def allow(self, nodes: Sequence[Node]) -> bool:
        """Return whether nodes can stand in the graph as these axes split it."""
        for checker in self.checkers:
            known, checker.known = checker.known, ChainMap({}, checker.known)
            try:
                for node in nodes:
                    checker.visit(node)
            except Mismatch:
                return False
            finally:
                checker.known = known
        return True

    def follow(self, nodes: Sequence[Node]) -> None:
        """Place what new nodes make; raises UnsupportedError where these axes cannot split them."""
        for checker in self.checkers:
            for node in nodes:
                try:
                    checker.visit(node)
                except Mismatch as wrong:
                    axis, operand = checker.axis, wrong.operand
                    raise UnsupportedError(
                        f"{node.op_type} {node.label!r} cannot be split along {axis} and another axis at once: it "
                        f"reads {operand.name!r}, which is {operand.placement} along {axis}, and takes "
                        f"{wrong.expected}",
                        f"split along one of them: leave {axis} out of the mesh, or name placements of parameters",
                    ) from None
