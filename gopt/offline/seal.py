"""``gopt seal``: new digests of a folder with edited files, or without digests.

One document is replaced, the manifest of a folder or the index of a step, in one step: the folder has the old digests
or the new ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gopt.artifact.checkpoint_index import (
    INDEX_FILE,
    LOCK_FILE,
    STATES_OF_RANK,
    VALUES_FILE,
    open_index,
)
from gopt.artifact.integrity import FileEntry, unchecked
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.path_diagnostics import check_folder
from gopt.artifact.report_record import REPORT_FILE
from gopt.artifact.states_file import STATES_FILE
from gopt.errors import InputError, RunError
from gopt.ir.external_data import naming
from gopt.ir.load import check_model_size
from gopt.system.files import is_regular_file, reason
from gopt.system.lock import is_locked
from gopt.system.signals import raise_on_signals
from gopt.system.staging import replace_file


@dataclass(frozen=True, slots=True)
class Sealed:
    """The document written by ``seal``. ``changed``: files with a changed or new entry."""

    path: Path
    files: int
    changed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-seal/1", "path": str(self.path), "files": self.files, "changed": list(self.changed)}


def seal(path: str | os.PathLike[str]) -> Sealed:
    """Take the files of an output folder, of a folder of checkpoints, or of one step as they are: write the digests
    into the manifest or index.

    Raises InputError for a damaged document, RunError for a document that cannot be written, or while a job writes
    there."""
    folder = Path(path)
    if not is_regular_file(folder / MANIFEST_FILE):
        check_folder(folder, checkpoints=True)
    with unchecked(), raise_on_signals():
        return _seal_step(folder) if is_regular_file(folder / INDEX_FILE) else _seal_folder(folder)


def _seal_folder(folder: Path) -> Sealed:
    _check_unlocked(folder)
    manifest, _ = read_manifest(folder)
    names = _known(manifest)
    present = [file.name for file in folder.iterdir() if file.name in names or VALUES_FILE.fullmatch(file.name)]
    files = {**(manifest.files or {}), **_entries(folder, present)}
    text = replace(manifest, written=None, files=files).text()
    return _written(folder / MANIFEST_FILE, text, manifest.files or {}, files)


def _known(manifest: Manifest) -> set[str]:
    """The files read by commands."""
    names = {manifest.source, manifest.startup, REPORT_FILE, STATES_FILE, *(manifest.files or {})}
    for rank in manifest.ranks:
        names |= {*rank.files.values(), rank.startup}
    return {name for name in names if name is not None}


def _seal_step(folder: Path) -> Sealed:
    home = Path(os.path.realpath(folder)).parent
    _check_unlocked(home)
    manifest, _ = read_manifest(home)
    index = open_index(folder)
    entries = {
        **index.files,
        **_entries(folder, (file.name for file in folder.iterdir() if STATES_OF_RANK.fullmatch(file.name))),
    }
    text = replace(
        index, manifest=replace(index, files=entries).of_run(manifest).digest(), run=manifest.run, files=entries
    ).text()
    return _written(folder / INDEX_FILE, text, index.files, entries)


def _check_unlocked(root: Path) -> None:
    if is_locked(root / LOCK_FILE):
        raise RunError(f"another job writes checkpoints into {root}", "wait for its end")


def _entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    entries = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise InputError(f"{folder / name} is not a regular file", "move it away")
        try:
            if name.endswith(".onnx"):
                with naming(str(folder / name)):
                    check_model_size((folder / name).stat().st_size)
            entries[name] = FileEntry.of_file(folder / name)
        except OSError as error:
            raise InputError(f"{folder / name} cannot be read: {reason(error)}", "let this user read it") from error
    return entries


def _written(path: Path, text: str, before: Mapping[str, FileEntry], files: Mapping[str, FileEntry]) -> Sealed:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}", "it is as it was") from error
    return Sealed(path, len(files), tuple(name for name, entry in files.items() if before.get(name) != entry))
