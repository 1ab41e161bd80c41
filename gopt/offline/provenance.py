"""The bytes of files behind every state: the pieces from which ``merge`` and ``reshard`` put values together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt.artifact.checkpoint_index import INDEX_FILE, open_index
from gopt.artifact.integrity import FileEntry, is_unchecked
from gopt.artifact.manifest import MANIFEST_FILE
from gopt.artifact.pieces import Piece
from gopt.documents.records import to_document
from gopt.errors import InputError, OptionError
from gopt.ir.types import nbytes
from gopt.offline.folder_contents import read_folder
from gopt.offline.text import sha256_of
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class PieceBytes:
    """A piece of a state, and the place: ``nbytes`` bytes from ``offset`` of a file, with the SHA-256 of the bytes."""

    piece: Piece
    file: str
    offset: int
    nbytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return to_document(self.piece) | {
            "file": self.file, "offset": self.offset, "bytes": self.nbytes, "sha256": self.sha256,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Provenance(HtmlTable):
    """Result of ``provenance``. ``files``: the entries of ``document`` for the files of ``pieces``, after a comparison.
    ``drawn``: states from a seed; ``missing``: states without a value."""

    path: str
    document: str
    files: Mapping[str, FileEntry]
    pieces: tuple[PieceBytes, ...]
    drawn: tuple[str, ...]
    missing: tuple[str, ...]

    def __repr__(self) -> str:
        states = {entry.piece.tensor for entry in self.pieces}
        return f"<Provenance {self.path}: {len(states)} states in {len(self.pieces)} pieces of {len(self.files)} files>"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "gopt-provenance/1", "path": self.path, "document": self.document,
            "files": {name: to_document(entry) for name, entry in self.files.items()},
            "pieces": [entry.to_json() for entry in self.pieces],
            "drawn": list(self.drawn), "missing": list(self.missing),
        }  # fmt: skip


def provenance(path: str | os.PathLike[str]) -> Provenance:
    """The bytes behind every state of a folder, or of a step of a checkpoint, after a check of all digests.

    Raises InputError for a folder without digests, OptionError where digests are not compared; for an edited file as
    ``read_folder``."""
    if is_unchecked():
        raise OptionError("the map is of files that agree with their digests", "leave out --unchecked")
    contents = read_folder(path)
    document, entries = MANIFEST_FILE, contents.manifest.files
    if contents.trained:
        document, entries = INDEX_FILE, open_index(Path(path)).files
    if entries is None:
        raise InputError(f"{path} has no digests: an older gopt wrote it", f"gopt seal {path} adds them")
    pieces = []
    for name, places in contents.pieces.items():
        for (box, every), stored in places.items():
            for start, tensor in sorted(stored.items()):
                size = nbytes(tensor.type.dtype, tensor.type.elements)
                piece = Piece(name, start, start + tensor.type.elements, box, every)
                pieces.append(PieceBytes(piece, Path(tensor.path).name, tensor.offset, size, sha256_of(tensor)))
    files = {name: entries[name] for name in sorted({entry.file for entry in pieces})}
    drawn = [
        state.tensor for state in contents.manifest.states
        if state.tensor not in contents.pieces and state.tensor not in contents.missing
    ]  # fmt: skip
    return Provenance(str(path), document, files, tuple(pieces), tuple(drawn), tuple(contents.missing))
