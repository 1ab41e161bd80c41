"""Two models, output folders or checkpoints, compared by their computations; names of inner values do not matter.

``pairing`` matches nodes; ``models`` and ``nodes`` tell where a pair differs; ``folders`` compares every rank's graph
and, with ``json_records``, manifests and reports; ``checkpoints`` compares the values of states; ``review`` compares
records alone; ``sections`` are tables for people."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gopt.artifact.checkpoint_index import INDEX_FILE
from gopt.artifact.path_diagnostics import check_folder
from gopt.errors import InputError, OptionError
from gopt.importers.load import holds_step
from gopt.offline.diff.checkpoints import diff_checkpoints
from gopt.offline.diff.folders import diff_folders, review_folders
from gopt.offline.diff.models import diff_models
from gopt.offline.diff.result import Diff
from gopt.offline.diff.values import EXACT, Tolerance
from gopt.text.suggestions import near_file

__all__ = ["Diff", "Tolerance", "diff", "review"]

_HINT = "gopt merge makes a model of an output folder or a checkpoint, and models can be compared"


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], tolerance: Tolerance = EXACT) -> Diff:
    """Compare two ONNX files, two output folders, or a step of each of two checkpoints, with all their differences.

    ``tolerance``: how far values of states may be apart. Raises InputError for an unreadable path, RunError for a
    damaged checkpoint, OptionError for two paths of different kinds."""
    return _compare(Path(a), Path(b), tolerance, diff_folders)


def review(a: str | os.PathLike[str], b: str | os.PathLike[str], tolerance: Tolerance = EXACT) -> Diff:
    """As ``diff``, but for output folders with unequal manifests or reports no graph of a rank is read."""
    return _compare(Path(a), Path(b), tolerance, review_folders)


def _compare(
    old: Path, new: Path, tolerance: Tolerance, compare_folders: Callable[[Path, Path, Tolerance], Diff]
) -> Diff:
    for path in (old, new):
        if not path.exists():
            raise InputError(f"there is no {path}", *near_file(path))
    models = [not path.is_dir() or holds_step(path) for path in (old, new)]
    if models[0] != models[1]:
        raise OptionError("diff takes two models or two output folders, not one of each", _HINT)
    if all(models):
        return diff_models(old, new, tolerance)
    for path in (old, new):
        check_folder(path, checkpoints=True)
    checkpoints = [(path / INDEX_FILE).is_file() for path in (old, new)]
    if all(checkpoints):
        return diff_checkpoints(old, new, tolerance)
    if any(checkpoints):
        raise OptionError("diff takes two output folders or two checkpoints, not one of each", _HINT)
    return compare_folders(old, new, tolerance)
