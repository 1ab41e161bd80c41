"""A step of each of two checkpoints: the value of every state, whatever ranks wrote it."""

from __future__ import annotations

from pathlib import Path

from gopt.artifact.checkpoint_index import open_index
from gopt.offline.diff.models import diff_graphs
from gopt.offline.diff.result import Diff, FileDifference
from gopt.offline.diff.values import EXACT, Tolerance
from gopt.offline.folder_contents import read_folder


def diff_checkpoints(a: Path, b: Path, tolerance: Tolerance = EXACT) -> Diff:
    """Compare the states of two checkpoints value by value, their sources, meshes and steps."""
    first, second = read_folder(a), read_folder(b)
    lines = []
    for what, before, after in (
        ("step", *(open_index(path).step for path in (a, b))),
        ("mesh", *(held.manifest.mesh.mesh() for held in (first, second))),
    ):
        if before != after:
            lines.append(FileDifference("record", f"{what}: {before} -> {after}"))
    result = diff_graphs(
        str(a), first.graph, str(b), second.graph, states=True, roles=(first.roles, second.roles), tolerance=tolerance
    )
    return Diff(str(a), str(b), (*lines, *result.lines), result.renamed, result.notes)
