"""Inputs of a verb: a path, or an object of another verb, written to a temporary folder for reading."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from gopt.steps.sharded import Sharded
from gopt.steps.split import Split


@runtime_checkable
class HasPath(Protocol):
    """An object lying on disk, such as a ``Run``."""

    @property
    def path(self) -> Path: ...


Folder: TypeAlias = str | os.PathLike[str] | Sharded | Split | HasPath
"""An output folder or a checkpoint, what ``shard`` or ``split`` returned, or a run."""


@contextmanager
def on_disk(folder: Folder) -> Iterator[Path]:
    """The path of the given folder."""
    if isinstance(folder, str | os.PathLike):
        yield Path(folder)
    elif isinstance(folder, Sharded | Split):
        home = TemporaryFolder()
        try:
            yield home.write(folder)
        finally:
            home.remove()
    else:
        yield folder.path


class TemporaryFolder:
    """A folder removed with the last reference to this object, at the latest when Python ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gopt-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def write(self, result: Sharded | Split) -> Path:
        """Write an output folder inside; returns where."""
        target = self.path / "ranks"
        result.write(target)
        return target


def keep_alive(reader: object, owner: object) -> None:
    """Let ``owner`` live as long as ``reader``, which reads files of ``owner`` on demand."""
    weakref.finalize(reader, _forget, owner)


def _forget(owner: object) -> None:
    return None
