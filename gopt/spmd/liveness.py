"""Largest sums of bytes alive at once while a rank runs some nodes in order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from gopt.ir.graph import Graph, Node
from gopt.ir.types import nbytes
from gopt.operators.kinds import VIEWS
from gopt.records.placements import Sharding

SHARES_MEMORY = VIEWS | {"Select"}
"""Operators whose result can share its operand's memory."""


@dataclass(frozen=True, slots=True)
class LivePeaks:
    """Largest sums of bytes alive at once, each at its own moment; ``peak`` of all of them together.

    ``activations``: whatever is neither a gradient nor gathered.
    """

    peak: int
    activations: int
    gradients: int
    gathered: int


def peaks(
    nodes: Sequence[Node], sizes: Sizes, kinds: Mapping[str, str], kept: Set[str] = frozenset()
) -> LivePeaks:  # fmt: skip
    """Find the peaks of live bytes in a sweep from the last node to the first.

    A value is live from the producer to the last reader; without a reader, or if ``kept``, to the end. ``kinds``:
    value -> the field of the record that counts it, elsewhere activations.
    """
    views = {node.outputs[0]: node.inputs[0] for node in nodes if node.op_type in SHARES_MEMORY and node.inputs[0]}
    root: dict[str, str] = {}
    for name, base in views.items():
        root[name] = root.get(base, base)
    results = {name for node in nodes for name in node.outputs}
    read = {name for node in nodes for name in node.reads}
    now = dict.fromkeys(("gradients", "gathered", "activations"), 0)
    held = {base if (base := root.get(name, name)) in results else name for name in kept & results}
    live = {name: sizes.of(name) for name in (results - read - root.keys()) | held}
    """Value that is alive -> its bytes."""
    for name, size in live.items():
        now[kinds.get(name, "activations")] += size
    peak, alive = dict(now), sum(now.values())
    most = alive
    for node in reversed(nodes):
        for name in node.reads:
            name = root.get(name, name)
            if name not in live and name in results:  # another rank may make it
                size = live[name] = sizes.of(name)
                if size:
                    kind = kinds.get(name, "activations")
                    alive += size
                    now[kind] += size
                    if now[kind] > peak[kind]:
                        peak[kind] = now[kind]
        if alive > most:
            most = alive
        for name in node.outputs:
            if size := live.get(name, 0):
                alive -= size
                now[kinds.get(name, "activations")] -= size
    return LivePeaks(most, peak["activations"], peak["gradients"], peak["gathered"])


class Sizes:
    """Bytes of the nodes' values on a rank. ``kept``: new states, not counted; ``parts``: values held in parts."""

    def __init__(
        self,
        graph: Graph,
        names: Iterable[str],
        parts: Mapping[str, Sharding] = MappingProxyType({}),
        coordinates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.types, self.parts, self.coordinates = graph.types, parts, coordinates
        self.kept = frozenset(names)

    def of(self, name: str) -> int:
        """Bytes of a value; 0 if not counted or unknown."""
        type = self.types.get(name)
        if type is None or not type.static or name in self.kept:
            return 0
        if name in self.parts:
            return nbytes(type.dtype, math.prod(self.parts[name].local_shape(type.dims, self.coordinates)))
        return type.nbytes
