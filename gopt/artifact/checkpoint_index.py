"""The index of a step of a checkpoint: size and digest of every rank's file. It is written last, so that a step with
an index is complete.

Files are read in blocks: a check needs constant memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gopt import documents
from gopt.artifact.manifest import Manifest
from gopt.documents.records import from_document, key, to_document
from gopt.errors import InputError, RunError

INDEX_FILE = "index.json"
FORMAT = "gopt-checkpoint/1"
LOCK_FILE = ".gopt.lock"
"""File in a folder of checkpoints that the job which writes them locks; it is never removed."""
_BLOCK = 1 << 22
STEP_DIR = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size and the SHA-256 of a file."""

    nbytes: int = field(metadata=key("bytes"))
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """One complete step of a checkpoint: the digest of its ranks' manifest, and the file of every rank."""

    format: str = FORMAT
    step: int
    manifest: str
    files: Mapping[str, FileEntry]

    def text(self) -> str:
        """The text of the file."""
        return json.dumps(to_document(self), indent=1)


def step_dir(step: int) -> str:
    """The folder of one step, inside the one that holds the checkpoints."""
    return f"step_{step:08d}"


def complete_steps(home: Path) -> list[int]:
    """Steps of which a folder holds a complete checkpoint, in order."""
    found = []
    for path in home.iterdir() if home.is_dir() else ():
        match = STEP_DIR.fullmatch(path.name)
        if match and (path / INDEX_FILE).is_file():
            found.append(int(match[1]))
    return sorted(found)


def rank_states_file(rank: int) -> str:
    return f"rank_{rank:04d}.safetensors"


def read_index(folder: Path, manifest: Manifest) -> CheckpointIndex:
    """The index of one step of a checkpoint; raises RunError when it is damaged, or of other ranks than the
    manifest's."""
    index = open_index(folder)
    if index.manifest != manifest.digest() and manifest.parameter_server is not None:
        raise RunError(
            f"checkpoint {folder} was written by other trainers or servers",
            f"make a split for these of it: gopt reshard {folder} --trainers T --servers S -o DIR",
        )
    if index.manifest != manifest.digest():
        raise RunError(
            f"checkpoint {folder} was written by ranks of another folder", "make ranks from it with gopt reshard"
        )
    return index


def open_index(folder: Path) -> CheckpointIndex:
    """The index of one step of a checkpoint; raises RunError when it is damaged."""
    try:
        index = from_document(CheckpointIndex, documents.read_json(folder / INDEX_FILE, documents.INDEX))
        match = STEP_DIR.fullmatch(os.path.basename(os.path.realpath(folder)))
        if match and int(match[1]) != index.step:
            raise InputError(f"{folder / INDEX_FILE}: step: {index.step} differs from the step of its folder")
    except InputError as error:
        raise RunError(
            f"the checkpoint is damaged: {error.message}", f"remove {folder} to continue from the one before"
        ) from error
    return index


def check_states_file(path: Path, entry: FileEntry | None) -> None:
    """Raise RunError when a rank's file is missing, or differs from its ``entry`` of the index."""
    if entry is None or not path.is_file():
        raise RunError(f"checkpoint {path.parent} lacks {path.name}", "remove it to continue from the one before")
    seen = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_BLOCK):
                seen.update(chunk)
            size = file.tell()
    except OSError as error:
        raise RunError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if size != entry.nbytes or seen.hexdigest() != entry.sha256:
        raise RunError(f"checkpoint {path} is damaged", f"remove {path.parent} to continue from the one before")
