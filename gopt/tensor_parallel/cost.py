"""The cost of mappings: the bytes that they send, or their time on links as ``gopt plan`` counts it.

A call starts anew for what the forward or the backward waits for. What the update alone reads, and single numbers, go
with others of their kind in one call: of them only the bytes count.
"""

from __future__ import annotations

from dataclasses import dataclass

from gopt.ir.graph import Graph
from gopt.ir.phase import Phase
from gopt.mesh import Mesh
from gopt.sharding.conversions import Conversion, Mapping
from gopt.sharding.placements import Placement
from gopt.topology import Link, Topology

_HANDED_ON = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Add", "Sum", "Neg")
"""Through these, gradients go from where they are made to the update."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a mapping among the ``members`` of an axis: bytes that a member sends; with a ``link``, seconds."""

    members: int
    link: Link | None = None

    @classmethod
    def parse(cls, text: str, mesh: Mesh, axis: str) -> Cost:
        """The cost along an axis on links as ``--link`` takes them; '': by bytes. Raises OptionError."""
        return cls(mesh.size(axis), Topology.parse(text, mesh).of(axis) if text else None)

    def of(self, before: Placement, after: Placement, nbytes: int, *, packed: bool = False) -> float:
        """Return the cost of converting a whole value of ``nbytes`` from one placement to another; infinite where no
        mapping does. ``packed``: the value goes in one call with others."""
        conversion = Conversion(before, after)
        sent = conversion.sent(nbytes, self.members)
        if self.link is None or not sent:
            return sent
        rounds = 0 if packed else 2 if conversion.mapping is Mapping.REDUCE else 1
        return self.link.seconds(rounds, self.members, sent)


@dataclass(frozen=True, slots=True)
class Packed:
    """Which calls go together with others: of a step, ``late`` are the values that the update alone reads."""

    graph: Graph
    late: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> Packed:
        """Of a step that is not split yet. One sweep."""
        awaited: set[str] = set()
        for node in reversed(graph.nodes):
            hands_on = node.is_a(*_HANDED_ON) and awaited.isdisjoint(node.outputs)
            if node.phase is not Phase.UPDATE and not hands_on:
                awaited.update(node.reads)
        return cls(graph, frozenset(name for node in graph.nodes for name in node.outputs if name not in awaited))

    def has(self, name: str, phase: Phase | None) -> bool:
        """Return whether a call on a value is packed that stands in some phase."""
        type = self.graph.type_of(name)
        return phase is Phase.UPDATE or name in self.late or (type.static and type.elements == 1)
