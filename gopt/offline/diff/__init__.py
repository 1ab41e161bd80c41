"""Two models, or two output folders, compared by what they compute; names of inner values do not matter.

``pairing`` settles which node is which; ``models`` and ``nodes`` tell where a pair differs; ``folders`` compares every
rank's graph and, with ``records``, what the manifests and reports say.
"""

from __future__ import annotations

import os
from pathlib import Path

from gopt.errors import InputError, OptionError
from gopt.offline.diff.folders import diff_folders
from gopt.offline.diff.models import diff_models
from gopt.offline.diff.result import Diff

__all__ = ["Diff", "diff"]


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Diff:
    """Compare two ONNX files or two output folders.

    Raises InputError where one cannot be read, OptionError for a file beside a folder.
    """
    first, second = Path(a), Path(b)
    for path in (first, second):
        if not path.exists():
            raise InputError(f"there is no {path}")
    if first.is_dir() != second.is_dir():
        raise OptionError("diff takes two models or two output folders, not one of each")
    return diff_folders(first, second) if first.is_dir() else diff_models(first, second)
