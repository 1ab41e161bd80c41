"""The axes of a mesh splitting the computation of a step."""

from __future__ import annotations

from gopt.analysis.training import TrainingGraph
from gopt.records.mesh import EXPERT, SPACE, TENSOR, TOKENS, Mesh

ORDER = (TENSOR, EXPERT, *TOKENS, *SPACE)
"""Axes that split the computation, in the order in which they are applied."""


def splitting_axes(mesh: Mesh, training: TrainingGraph) -> list[str]:
    """Return the axes of a mesh splitting the computation. Left out: axes that the user declared as replicas, and axes
    that have collectives in the source."""
    groups = {str(node.attributes["group"]) for node in training.calls}
    called = {axis for group in groups for axis in mesh.live(group)}
    members = dict(mesh.axes)
    return [axis for axis in ORDER if members.get(axis, 1) > 1 and axis not in dict(mesh.kinds) and axis not in called]
