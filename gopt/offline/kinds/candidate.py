"""A path of unknown kind: the first bytes, and an ONNX message if any, each read on demand."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from onnx import ModelProto

from gopt.errors import InputError
from gopt.ir.external_data import naming, regular_size
from gopt.ir.load import read_file

HEAD = 4096
"""Bytes read to distinguish files that are not ONNX."""


class FileCandidate:
    """``path`` and its readable parts. The name does not count."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @cached_property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def size(self) -> int:
        """Size of the file in bytes; raises InputError for a missing file, or a path that is no regular file."""
        with naming(os.fspath(self.path)):
            return regular_size(os.fspath(self.path))

    @cached_property
    def head(self) -> bytes:
        """The first bytes; empty for a folder."""
        if self.is_folder or not self.size:
            return b""
        with self.path.open("rb") as file:
            return file.read(HEAD)

    @cached_property
    def model(self) -> ModelProto | None:
        """The message of an ONNX model; None for other and for damaged files."""
        if self.is_folder:
            return None
        try:
            with naming(os.fspath(self.path)):
                return read_file(os.fspath(self.path)).model
        except InputError:
            return None

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The ``metadata_props`` of a model."""
        return {} if self.model is None else {entry.key: entry.value for entry in self.model.metadata_props}
