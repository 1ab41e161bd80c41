"""A step of each of two checkpoints: the value of every state, whatever ranks wrote it."""

from __future__ import annotations

from pathlib import Path

from gopt.artifact.checkpoint_index import open_index
from gopt.offline.diff.models import diff_graphs
from gopt.offline.diff.result import Diff, FileDifference
from gopt.offline.diff.values import EXACT, Tolerance
from gopt.offline.folder_contents import read_folder


def diff_checkpoints(a: Path, b: Path, tolerance: Tolerance = EXACT) -> Diff:
    """Compare the states of two checkpoints value by value, and sources, meshes and steps."""
    old, new = read_folder(a), read_folder(b)
    lines = []
    for what, before, after in (
        ("step", *(open_index(path).step for path in (a, b))),
        ("mesh", *(contents.manifest.mesh.mesh() for contents in (old, new))),
    ):
        if before != after:
            lines.append(FileDifference("record", f"{what}: {before} -> {after}"))
    result = diff_graphs(
        str(a), old.graph, str(b), new.graph, states=True, roles=(old.roles, new.roles), tolerance=tolerance
    )
    return Diff(str(a), str(b), (*lines, *result.lines), result.renamed, result.notes)
