"""Resolves paths as the system does: ``link/../NAME`` is beside the target of the link, not beside the link."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def real_path(path: str | os.PathLike[str]) -> Path:
    """The path for reads and writes: the real parent folder, and the name.

    The name itself is not followed: a link stays a link. Raises OSError for paths beyond the system: a name that is too
    long, a missing folder before ``..``, a vanished current folder."""
    parts = Path(path).parts
    fixed = len(parts) - parts[::-1].index("..") if ".." in parts else 0
    head = os.path.realpath(os.path.join(*parts[:fixed]), strict=True) if fixed else ""
    if fixed == len(parts):  # ``..`` and ``.`` have no name of their own
        return Path(head or os.path.realpath(os.curdir))
    whole = Path(os.path.realpath(os.path.join(head, *parts[fixed:-1]) or os.curdir), parts[-1])
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(whole)
    return whole
