"""The record in ``reproducer.json``: the command, its inputs, the versions and the failure."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from gopt.documents.records import OPTIONAL
from gopt.offline.reproducer.failure import Failure

FORMAT = "gopt-reproducer/1"
_LIBRARIES = ("onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "ml_dtypes", "protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument: an option with a text, an input or an output as its value, an option alone, or an input alone.

    ``input``: the index of an input. ``output``: the name of a file or folder that the command writes.
    """

    option: str = field(default="", metadata=OPTIONAL)
    text: str | None = field(default=None, metadata=OPTIONAL)
    input: int | None = field(default=None, metadata=OPTIONAL)
    output: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file or folder that the command reads, and the names and bytes of what is kept of it.

    ``kind``: ``model``, ``folder`` or ``configuration``. ``name``: the last part of its path.
    """

    name: str
    kind: str
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEntry:
    """A failure as it is kept."""

    exit_code: int
    kind: str
    message: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducer:
    """A failing command. ``values``: whether stored values are in the file; ``left_out``: options that are not."""

    format: str = FORMAT
    command: str
    arguments: tuple[Argument, ...]
    inputs: tuple[Input, ...]
    values: bool
    left_out: tuple[str, ...]
    versions: Mapping[str, str]
    failure: FailureEntry

    def failed(self) -> Failure:
        """How the command failed when it was recorded."""
        kept = self.failure
        return Failure(kept.exit_code, kept.kind, kept.message, kept.where)


def versions() -> dict[str, str]:
    """The versions of gopt, of Python, and of the libraries that read and run graphs."""
    from gopt import __version__

    found = {"gopt": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
