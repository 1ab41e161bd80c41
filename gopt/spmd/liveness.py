"""Largest sums of bytes alive at once while a rank runs some nodes in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from gopt.ir.graph import Node
from gopt.operators.kinds import VIEWS


class ByteCounts(Protocol):
    """Bytes of values on a device."""

    def nbytes(self, name: str) -> int: ...


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
    nodes: Sequence[Node], sizes: ByteCounts, updated: Set[str], kinds: Mapping[str, str], results: Set[str]
) -> LivePeaks:  # fmt: skip
    """Find the peaks of live bytes in a sweep from the last node to the first.

    A value is live from the producer to the last reader, and to the end if among ``results``; an unread output, as
    the places of a MaxPool, while its node runs. ``updated``: new states, not counted; ``kinds``: value -> the field of
    the record that counts it, elsewhere activations.
    """

    def size_of(name: str) -> int:
        return 0 if name in updated else sizes.nbytes(name)

    views = {node.outputs[0]: node.inputs[0] for node in nodes if _shares(node, sizes)}
    root: dict[str, str] = {}
    for name, base in views.items():
        root[name] = root.get(base, base)
    produced = {name for node in nodes for name in node.outputs if name}
    read = {name for node in nodes for name in node.reads}
    ends = {base if (base := root.get(name, name)) in produced else name for name in (results - updated) & produced}
    unread = produced - read - root.keys() - ends
    now = dict.fromkeys(("gradients", "gathered", "activations"), 0)
    live = {name: size_of(name) for name in ends}
    """Value that is alive -> its bytes."""
    for name, size in live.items():
        now[kinds.get(name, "activations")] += size
    peak, alive = dict(now), sum(now.values())
    most = alive
    for node in reversed(nodes):
        touched = map(root.get, node.reads, node.reads)
        for name in chain(unread.intersection(node.outputs), touched) if unread else touched:
            if name not in live and name in produced:  # another rank may make it
                size = live[name] = size_of(name)
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


def _shares(node: Node, sizes: ByteCounts) -> bool:
    """Return whether a result can share the memory of the first operand: of a whole tensor in a bucket, too."""
    if node.op_type == "LocalSlice":
        return len(node.inputs) == 1 and sizes.nbytes(node.inputs[0]) == sizes.nbytes(node.outputs[0])
    return node.op_type in SHARES_MEMORY and bool(node.inputs[0])
