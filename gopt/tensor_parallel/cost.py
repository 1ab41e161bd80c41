"""Costs of mappings: the bytes a member sends, or seconds on links as ``gopt plan`` counts them.

A value awaited by the forward or the backward pays for a call of its own. Values that only the update reads, and
scalars, share packed calls: they pay for the bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass

from gopt.ir.graph import Graph
from gopt.ir.phase import Phase
from gopt.operators.kinds import CASTS, MOVES, SUMS
from gopt.records.mesh import Mesh
from gopt.records.placements import Placement
from gopt.records.topology import Link, Topology
from gopt.spmd.conversions import Conversion, MappingKind

_HANDED_ON = MOVES | SUMS | CASTS | {"Neg"}
"""Operators between the node that makes a gradient and the update."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of mappings among the ``members`` of an axis, in bytes sent by a member; with a ``link``, in seconds."""

    members: int
    link: Link | None = None

    @classmethod
    def parse(cls, text: str, mesh: Mesh, axis: str) -> Cost:
        """Return the cost along an axis. ``text``: a link as ``--link`` takes it, or '' for bytes. Raises
        OptionError."""
        return cls(mesh.size(axis), Topology.parse(text, mesh).of(axis) if text else None)

    def of(self, before: Placement, after: Placement, nbytes: int, *, packed: bool = False) -> float:
        """Return the cost of bringing a value of ``nbytes`` (whole) from one placement to another; infinite where no
        mapping does that. ``packed``: the value shares a call with others."""
        conversion = Conversion(before, after)
        sent = conversion.sent(nbytes, self.members)
        if self.link is None or not sent:
            return sent
        rounds = 0 if packed else 2 if conversion.mapping is MappingKind.REDUCE else 1
        return self.link.seconds(rounds, self.members, sent)


@dataclass(frozen=True, slots=True)
class Packed:
    """Knows which calls are packed with others. ``late``: the values of a step that only the update reads."""

    graph: Graph
    late: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> Packed:
        """Return the packing of a step that is not split yet. A sweep."""
        awaited: set[str] = set()
        for node in reversed(graph.nodes):
            hands_on = node.is_in(_HANDED_ON) and awaited.isdisjoint(node.outputs)
            if node.phase is not Phase.UPDATE and not hands_on:
                awaited.update(node.reads)
        return cls(graph, frozenset(name for node in graph.nodes for name in node.outputs if name not in awaited))

    def has(self, name: str, phase: Phase | None) -> bool:
        """Return whether a call on a value, in some phase, is packed with others."""
        type = self.graph.type_of(name)
        return phase is Phase.UPDATE or name in self.late or (type.static and type.elements == 1)
