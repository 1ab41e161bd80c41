"""The folder of a job's checkpoints. One job at a time uses it, and files are added, never changed.

Manifest, report and source lie beside the steps, so that ``gopt merge`` and ``gopt reshard`` need nothing else. A file
that is equal is not written again; every other file is renamed into place. A step is removed index first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from gopt.artifact.checkpoint_index import (
    INDEX_FILE,
    LOCK_FILE,
    STATES_OF_RANK,
    STEP_DIR,
    VALUES_FILE,
    CheckpointIndex,
    complete_steps,
    open_index,
    read_index,
    step_dir,
)
from gopt.artifact.integrity import FileEntry, fault_of
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.output_paths import check_not_inside, resolve_output
from gopt.artifact.report_record import REPORT_FILE
from gopt.artifact.serialize import SOURCE_FILE, model_bytes
from gopt.artifact.states_file import INLINE, StatesFile
from gopt.documents import MANIFEST, REPORT, parse_json, read_bytes, read_json
from gopt.documents.records import from_document
from gopt.errors import InputError, NoteWarning, OptionError, RunError
from gopt.ir.load import load
from gopt.system.files import digest_of, is_regular_file, make_folders, reason, sync
from gopt.system.lock import is_at, is_locked, lock_file
from gopt.system.staging import replace_file, staged_file, sweep
from gopt.text.sanitize import show_path

_HINT = "choose another folder"
_SHARED = (LOCK_FILE, MANIFEST_FILE, REPORT_FILE, SOURCE_FILE)
"""The files beside the steps, with the large constants of the source."""


def check_checkpoint_folder(root: Path, folder: Path) -> None:
    """Raise OptionError where checkpoints of the sharded step ``folder`` must not be written to ``root``."""
    whole = Path(os.path.realpath(resolve_output(root)))  # a link to the folder will do
    if whole == Path(os.path.realpath(folder)):
        raise OptionError(f"--checkpoint {root} is the folder of ranks itself", "choose another one")
    if (root / INDEX_FILE).is_file():
        raise OptionError(
            f"--checkpoint {root} is a single checkpoint", f"give the folder that holds it: {root.parent}"
        )
    files = ("rank_*.onnx", "server_*.onnx")
    if (root / "manifest.json").is_file() and any(any(root.glob(pattern)) for pattern in files):
        raise OptionError(f"--checkpoint {root} is an output folder", "choose another one")
    check_not_inside(root, whole, "choose another --checkpoint, and move there what you want to continue from")


@contextmanager
def open_checkpoint_folder(root: Path, folder: Path, manifest: Manifest, keep: int) -> Iterator[tuple[str, int]]:
    """Lock the folder for one job, remove what an earlier job left incomplete, and write what all steps share; the
    job takes the identity of the present steps, or a new identity. The open file is the lock.

    Raises RunError when another job has locked it, when it has checkpoints of another sharded step, and where nothing
    can be written: then nothing stays that was not there.
    """
    missing, present = _guarded(root, lambda: _before(root))
    with _undone(lambda: _remove_folders(missing)):
        number = _guarded(root, lambda: _lock(root))

    def begin() -> str:
        sweep(root)
        _check_manifest(root, manifest)
        _check_steps(root)
        run = identity(root) or new_identity()
        _share(root, folder, run)
        prune(root, keep)
        return run

    def undo() -> None:
        for path in root.iterdir() if MANIFEST_FILE not in present else ():  # else it may name a new file
            if path.name not in present and (path.name in _SHARED or VALUES_FILE.fullmatch(path.name)):
                path.unlink()
        _remove_folders(missing)

    try:
        with _undone(undo):
            run = _guarded(root, begin)
        yield run, number
    finally:
        with suppress(OSError):  # nothing was written by it
            os.close(number)


def _before(root: Path) -> tuple[list[Path], set[str]]:
    """The missing folders of a path, the innermost first, and the names in a present folder."""
    missing = list(takewhile(lambda path: not path.exists(), (root, *root.parents)))
    return missing, {path.name for path in root.iterdir()} if root.is_dir() else set()


@contextmanager
def _undone(undo: Callable[[], None]) -> Iterator[None]:
    """Undo what was begun where the disk refuses it."""
    try:
        yield
    except RunError as error:
        if isinstance(error.__cause__, OSError):
            with suppress(OSError):
                undo()
        raise


def _remove_folders(folders: Iterable[Path]) -> None:
    """Remove empty folders, the innermost first."""
    for folder in folders:
        folder.rmdir()


def check_there(root: Path, number: int) -> None:
    """Raise FileNotFoundError where the folder of this lock is no longer at its path."""
    if not is_at(number, root / LOCK_FILE):
        raise FileNotFoundError(errno.ENOENT, "its folder was moved away or replaced")


def check_unlocked(root: Path) -> None:
    """Raise RunError while another job has locked the folder: files may change during a read."""
    if is_locked(root / LOCK_FILE):
        raise _busy(root)


def _busy(root: Path) -> RunError:
    hint = "wait for its end, or choose another --checkpoint"
    return RunError(f"another job writes checkpoints into {root}", hint)


def _lock(root: Path) -> int:
    make_folders(root)
    number = lock_file(root / LOCK_FILE)
    if number is None:
        raise _busy(root)
    return number


def _check_manifest(root: Path, manifest: Manifest) -> None:
    """Raise RunError for checkpoints of another sharded step. The index of the newest step decides, because a
    manifest may be damaged."""
    if steps := complete_steps(root):
        read_index(root / step_dir(steps[-1]), manifest, identity(root))
        return
    try:
        stored = from_document(Manifest, read_json(root / MANIFEST_FILE, MANIFEST))
    except InputError:
        return
    if stored.parameter_server is not None and manifest.parameter_server is not None:
        stored = stored.with_trainers(manifest.mesh.ranks)  # a split may start with any number of trainers
    if stored.digest() != manifest.digest():
        raise RunError(f"{root} holds checkpoints of other ranks", "choose another --checkpoint, or use gopt reshard")


def _check_steps(root: Path) -> None:
    """Raise RunError where a foreign file has a step's name, so that the step could not be written later."""
    for path in root.iterdir():
        if STEP_DIR.fullmatch(path.name) and not (path / INDEX_FILE).is_file():
            if path.is_symlink() or not path.is_dir():
                raise RunError(f"cannot write checkpoints into {root}: {path.name} is a file", "move it away")
            if stray := next((file.name for file in path.iterdir() if not STATES_OF_RANK.fullmatch(file.name)), None):
                raise RunError(f"cannot write checkpoints into {root}: {path.name} holds {stray!r}", "move it away")


def newest_index(root: Path, manifest: Manifest) -> CheckpointIndex | None:
    """The index of the newest complete step, or None. Raises RunError for an index that is damaged or belongs to
    another folder."""
    newest = max(complete_steps(root), default=None)
    return None if newest is None else read_index(root / step_dir(newest), manifest, identity(root))


def identity(root: Path) -> str | None:
    """The identity of the job whose steps lie in a folder of checkpoints: from the manifest, or from all steps where
    the manifest is missing or damaged. None without steps, and in the folder of an older gopt.

    Raises RunError where the steps are of several jobs and the folder names none."""
    with suppress(InputError):
        return read_manifest(root)[0].run
    runs = {open_index(root / step_dir(step)).run for step in complete_steps(root)}
    if len(runs) > 1:
        raise RunError(
            f"{root} holds steps of several runs, and its {MANIFEST_FILE} is damaged",
            "move away the steps of other runs",
        )
    return next(iter(runs), None)


def new_identity() -> str:
    """A random identity for a job."""
    return secrets.token_hex(16)


def _share(root: Path, folder: Path, run: str) -> None:
    graph = load(folder / SOURCE_FILE, own=True)
    values = StatesFile()
    for name, tensor in graph.initializers.items():
        if tensor.nbytes > INLINE:
            values.add([(name, tensor)])
    data = _put_values(root, values)
    contents = {SOURCE_FILE: model_bytes(graph, values.offset, data, {}), REPORT_FILE: _report(folder)}
    files = {name: FileEntry.of(content) for name, content in contents.items()}
    if data:
        files[data] = FileEntry.of_file(root / data)
    bare = replace(read_manifest(folder)[0].bare, run=run)
    unchanged = {name for name, entry in files.items() if _is(root / name, entry)}
    if unchanged != files.keys() and (root / MANIFEST_FILE).exists():
        # At no moment may the manifest have another digest of a file than its own.
        replace_file(
            root / MANIFEST_FILE, replace(bare, files={name: files[name] for name in unchanged}).text().encode()
        )
    for name, content in contents.items():
        replace_file(root / name, content)
    replace_file(root / MANIFEST_FILE, replace(bare, files=files).text().encode())
    for path in root.iterdir():
        if VALUES_FILE.fullmatch(path.name) and path.name != data:
            path.unlink()


def _is(path: Path, entry: FileEntry) -> bool:
    """Return whether a file is there, with the content of an entry."""
    return is_regular_file(path) and not fault_of(path, entry)


def _report(folder: Path) -> bytes:
    data = read_bytes(folder / REPORT_FILE, REPORT.limit)
    parse_json(data, REPORT, str(folder / REPORT_FILE))
    return data


def _put_values(root: Path, values: StatesFile) -> str:
    """Write large constants of the source; returns the file's name, which contains the digest. So a source in this
    folder never refers to a file that is being replaced."""
    if not values.offset:
        return ""
    hasher = hashlib.sha256()
    for chunk in values.chunks():
        hasher.update(chunk)
    target = root / f"source.{hasher.hexdigest()[:8]}.bin"
    if not is_regular_file(target) or digest_of(target) != hasher.digest():
        with staged_file(target) as staged:
            with staged.open() as file:
                file.writelines(values.chunks())
            staged.commit_over()
    return target.name


def check_step(path: Path) -> None:
    """Raise OSError for a path that is no folder with files of a step alone: no file of the user is replaced."""
    if path.is_symlink() or not path.is_dir():
        raise FileExistsError(errno.EEXIST, "no checkpoint of gopt has this name")
    for file in path.iterdir():
        if file.name != INDEX_FILE and not STATES_OF_RANK.fullmatch(file.name):
            raise OSError(errno.ENOTEMPTY, f"it holds {file.name!r}, which gopt did not write: move it away")


def remove_step(path: Path) -> None:
    """Remove gopt's files of one step, the index first, so that the step never counts as complete. Other files and
    links stay. A note says where removal failed."""
    if path.is_symlink() or not path.is_dir():
        return
    try:
        (path / INDEX_FILE).unlink(missing_ok=True)
        sync(path)
        for file in path.iterdir():
            if STATES_OF_RANK.fullmatch(file.name) and is_regular_file(file):
                file.unlink()
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # files of the user
            warnings.warn(NoteWarning(f"{path} cannot be removed ({reason(error)}): remove it by hand"), stacklevel=2)


def prune(root: Path, keep: int) -> None:
    """Remove all steps before the newest ``keep`` complete steps, including incomplete ones."""
    oldest = complete_steps(root)[-keep:][:1]
    for path in root.iterdir():
        match = STEP_DIR.fullmatch(path.name)
        if match and oldest and int(match[1]) < oldest[0]:
            remove_step(path)


def _guarded(root: Path, work: Any) -> Any:
    try:
        return work()
    except OSError as error:
        whole = "the checkpoints in it are whole, and " if complete_steps(root) else ""
        raise unwritable(root, error, f"{whole}nothing was written: make room, or {_HINT}") from error


def unwritable(path: Path, error: OSError, hint: str = "the checkpoints before it are whole") -> RunError:
    """The RunError for a checkpoint that cannot be written, with the file's name if known."""
    name = error.filename if isinstance(error.filename, str) else str(path)
    within = f"{show_path(name)}: " if Path(name).name != path.name else ""
    return RunError(f"cannot write checkpoint {path}: {within}{reason(error)}", hint)
