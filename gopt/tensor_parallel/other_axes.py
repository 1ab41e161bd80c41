"""The axes of an already split graph while another axis is added."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.records.placements import PARTS, Placement
from gopt.spmd.rules import Mismatch, Operand
from gopt.tensor_parallel.check import Checker, together
from gopt.tensor_parallel.mappings import beside


@dataclass(slots=True)
class OtherAxes:
    """Axes of an already split graph while nodes for another axis are added. ``checkers``: by axis, with the placements
    of all values."""

    graph: Graph
    checkers: tuple[Checker, ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(checker.axis for checker in self.checkers)

    def of(self, name: str) -> tuple[Placement, ...]:
        """Return the placements of a value along these axes."""
        return tuple(checker.of(name) for checker in self.checkers)

    def fit(self, placed: Iterable[tuple[str, Placement]]) -> bool:
        """Return whether values can have these placements along another axis."""
        if not self.checkers:
            return True
        return all(
            together(part, peer) for name, part in placed if name and isinstance(part, PARTS)
            for peer in self.of(name) if isinstance(peer, PARTS)
        )  # fmt: skip

    def adds(self, node: Node, placement: Placement) -> bool:
        """Return whether a mapping along an existing axis keeps this placement along the new axis."""
        try:
            beside(node, Operand(node.inputs[0], placement))
        except Mismatch:
            return False
        return True

    def allow(self, nodes: Sequence[Node]) -> bool:
        """Return whether these axes can split the nodes."""
        for checker in self.checkers:
            placements, checker.known = checker.known, ChainMap({}, checker.known)
            try:
                for node in nodes:
                    checker.visit(node)
            except Mismatch:
                return False
            finally:
                checker.known = placements
        return True

    def follow(self, nodes: Sequence[Node]) -> None:
        """Set the placements of new nodes' results; raises UnsupportedError where these axes cannot split them."""
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
