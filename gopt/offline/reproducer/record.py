"""The record in ``reproducer.json``: the command, its inputs, the versions and the failure."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from gopt.documents.records import OPTIONAL, Count, Name, one_of
from gopt.offline.reproducer.failure import Failure

FORMAT = "gopt-reproducer/1"
_LIBRARIES = ("onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "ml_dtypes", "protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument: an option with a text, an input or an output as its value, an option alone, or an input alone."""

    option: str = field(default="", metadata=OPTIONAL)
    """The option as it is typed, such as --stage; the key is absent for an input that stands alone."""
    text: str | None = field(default=None, metadata=OPTIONAL)
    """The value of the option is this text."""
    input: Count | None = field(default=None, metadata=OPTIONAL)
    """The value is the input of this index."""
    output: Name | None = field(default=None, metadata=OPTIONAL)
    """The value is the path of what the command writes; the text is the last part of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file or folder that the command reads, and the names and bytes of the kept files."""

    name: Name
    """The name is the last part of the path that was given."""
    kind: Annotated[str, one_of("model", "folder", "configuration")]
    """A model is an ONNX file, a folder an output folder, a configuration a gopt.toml or a server map."""
    files: Mapping[str, Count]
    """The table has every file that the archive holds of the input, by its name without a folder. The value is the size
    of the file in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEntry:
    """A failure as it is kept."""

    exit_code: int
    """The exit code of the command."""
    kind: str
    """The kind is the class of the error, or result for a command that ended normally with this exit code."""
    message: str
    """The message is the first line of the error, with the names of inputs in the place of their paths."""
    where: str
    """The module and the function of gopt that raised a defect; the text is empty for a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducer:
    """The record reproducer.json of a reproducer says which command failed, with what, and how."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    command: str
    """The command of gopt that failed, such as shard."""
    arguments: tuple[Argument, ...]
    """The list has the arguments in the order of the command's help. Each item is one option with its value, an option
    alone, or an input alone."""
    inputs: tuple[Input, ...]
    """The list has the files and folders that the command reads. Each item is one file or folder; its files lie in the
    folder input_N of the archive, N being its index."""
    values: bool
    """The key says whether the archive holds the stored values of tensors of more than 1 KiB."""
    left_out: tuple[str, ...]
    """The list has the options of the command that are not in the reproducer, because the files that they name are not.
    Each item is an option, such as --data."""
    versions: Mapping[str, str]
    """The table has the versions of gopt, of Python and of libraries, and the kind of machine. The value is the version
    of what the key names."""
    failure: FailureEntry
    """The record says how the command failed."""

    def failed(self) -> Failure:
        """How the command failed when it was recorded."""
        failure = self.failure
        return Failure(failure.exit_code, failure.kind, failure.message, failure.where)


def versions() -> dict[str, str]:
    """The versions of gopt, of Python, and of the libraries that read and run graphs."""
    from gopt import __version__

    result = {"gopt": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in _LIBRARIES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result
