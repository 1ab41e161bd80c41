"""What a verb takes: a path, or an object of another verb, which is written to a temporary folder while it is read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

from gopt.api import Sharded, Split


class HasPath(Protocol):
    """An object that lies on disk, such as a ``Run``."""

    @property
    def path(self) -> Path: ...


Folder: TypeAlias = str | os.PathLike[str] | Sharded | Split | HasPath
"""An output folder or a checkpoint, what ``shard`` or ``split`` returned, or a run."""


@contextmanager
def on_disk(given: Folder) -> Iterator[Path]:
    """The path of what is given."""
    if isinstance(given, str | os.PathLike):
        yield Path(given)
    elif isinstance(given, Sharded | Split):
        with tempfile.TemporaryDirectory(prefix="gopt-") as home:
            target = Path(home) / given.source.name
            given.write(target)
            yield target
    else:
        yield given.path
