"""Phase of a node in a training step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gopt.ir.graph import Node


class Phase(str, Enum):
    """Source nodes have a phase once roles are recovered, added nodes once lowered."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


_ORDER = tuple(Phase)


def complete_phases(nodes: Sequence[Node]) -> None:
    """Set the phase of added nodes: the first phase reading the results.

    Unread results belong to the forward if computed from forward values alone, else to the update. Two sweeps over
    ``nodes``, which are in topological order.
    """
    added = [node for node in nodes if node.phase is None and node.made_by]
    results = {name for node in added for name in node.outputs}
    if not added:
        return
    phase_of: dict[str, int] = {}
    for node in reversed(nodes):
        if not node.captures and results.isdisjoint(node.inputs) and results.isdisjoint(node.outputs):
            continue  # most nodes: they neither read nor make a new value
        if node.phase is None and node.made_by:
            reader_phases = [phase_of[name] for name in node.outputs if name in phase_of]
            if not reader_phases:
                continue
            phase = min(reader_phases)
            node.phase = _ORDER[phase]
        elif node.phase is not None:
            phase = _ORDER.index(node.phase)
        else:
            continue
        for name in results.intersection(node.reads):
            phase_of[name] = min(phase, phase_of.get(name, phase))
    _complete_unread(nodes, {name for node in added if node.phase is None for name in node.reads})


def advance_phases(nodes: Sequence[Node]) -> None:
    """Bring added nodes with a phase to the first phase reading their results, where that is an earlier one.

    In a file, the update may stand in front of the forward, and be the first reader of a common value. A sweep over
    ``nodes``, which are in topological order.
    """
    results = {name for node in nodes if node.added for name in node.outputs}
    phase_of: dict[str, int] = {}
    for node in reversed(nodes):
        if node.phase is None:
            continue
        phase = _ORDER.index(node.phase)
        if node.added:
            phase = min([phase, *(phase_of[name] for name in node.outputs if name in phase_of)])
            node.phase = _ORDER[phase]
        for name in node.reads:
            if name in results:
                phase_of[name] = min(phase, phase_of.get(name, phase))


def _complete_unread(nodes: Sequence[Node], read: set[str]) -> None:
    """Set the phase of nodes with unread results; ``read``: the operands of these nodes."""
    phase_of: dict[str, Phase] = {}
    for node in nodes:
        if node.phase is None and node.made_by:
            phases = {phase_of[name] for name in node.reads if name in phase_of}
            node.phase = Phase.FORWARD if phases == {Phase.FORWARD} else Phase.UPDATE
        if node.phase is not None and not read.isdisjoint(node.outputs):
            phase_of.update(dict.fromkeys(node.outputs, node.phase))
