"""Checks output paths: only output of gopt may be replaced, and only without files of the user."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gopt.artifact.checkpoint_index import FORMAT as INDEX_FORMAT
from gopt.artifact.checkpoint_index import INDEX_FILE, LOCK_FILE, complete_steps
from gopt.artifact.manifest import FORMAT as MANIFEST_FORMAT
from gopt.artifact.manifest import MANIFEST_FILE
from gopt.artifact.manifest_check import parse_manifest
from gopt.artifact.report_record import REPORT_FILE
from gopt.artifact.serialize import SOURCE_FILE
from gopt.artifact.startup_graphs import STARTUP_FILE
from gopt.artifact.states_file import STATES_FILE
from gopt.documents import read_bytes
from gopt.documents.prescan import check_prescan
from gopt.errors import GoptError, InputError, OptionError, RunError
from gopt.spmd.stage_plan import SCHEDULE_FILE
from gopt.system.files import is_regular_file, reason
from gopt.system.paths import real_path

_HINT = "choose another path with -o"
_RANK = re.compile(r"((rank|server)_\d{4,}|trainer)(\.\w+){0,2}\.onnx")
_ALWAYS = frozenset({MANIFEST_FILE, REPORT_FILE, SOURCE_FILE, STATES_FILE})
_valid: dict[bytes, frozenset[str]] = {}
"""Digest of the manifest that passed last -> the rank files that it lists."""


def resolve_output(target: str | os.PathLike[str]) -> Path:
    """The real path of an output (``real_path``); raises RunError."""
    try:
        return real_path(target)
    except OSError as error:
        raise RunError(f"cannot write {os.fspath(target)}: {reason(error)}", _HINT) from error


def check_output_folder(target: Path, *, force: bool) -> Path:
    """The real path of an output folder; raises OptionError for a forbidden path, RunError for an unwritable path."""
    whole = resolve_output(target)
    check_resolved_folder(target, whole, force=force)
    return whole


def check_resolved_folder(target: Path, whole: Path, *, force: bool) -> None:
    """As ``check_output_folder``, of a resolved path."""
    if os.path.lexists(whole):
        if not force:
            raise existing(target, "folder", "-o", lambda: check_replaceable(target, whole))
        if _runs_in(whole):
            raise OptionError(f"{target} is the folder that this command runs in", "run it from another folder")
        check_replaceable(target, whole)
    check_not_inside(target, whole)


def existing(target: Path, what: str, option: str, check: Callable[[], object]) -> OptionError:
    """The refusal of an existing path; it names --force if ``check`` allows replacing."""
    hint = f"choose another {what} with {option}"
    try:
        check()
    except (GoptError, OSError):
        return OptionError(f"{target} exists already", hint)
    return OptionError(f"{target} exists already", f"{hint}, or replace it with --force")


def _runs_in(folder: Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(folder, os.curdir)
    return False


def check_not_inside(target: Path, whole: Path, hint: str = _HINT) -> None:
    """Raise OptionError for a path inside an output folder or a checkpoint.

    ``whole`` is the real path, ``target`` the user's.
    """
    for folder in whole.parents:
        if (what := artifact_kind(folder)) is not None:
            raise OptionError(f"{target} is inside {folder}, which is {what}", hint)


def artifact_kind(folder: Path) -> str | None:
    """``an output folder``, ``a checkpoint`` (one step, or the folder holding them), or None."""
    index = folder / INDEX_FILE
    if is_regular_file(index) and _format(index) == INDEX_FORMAT:
        return "a checkpoint"
    manifest = folder / MANIFEST_FILE
    if is_regular_file(manifest) and _format(manifest) == MANIFEST_FORMAT:
        return "a folder of checkpoints" if _is_home(folder) else "an output folder"
    return None


def check_replaceable(target: Path, folder: Path) -> None:
    """Raise OptionError unless a folder is empty or holds only output of gopt; ``target`` is its path in messages."""
    if folder.is_symlink():
        raise OptionError(f"{target} is a link: --force does not replace it", f"give {os.path.realpath(folder)}")
    if not folder.is_dir():
        raise OptionError(f"{target} is not a folder: --force does not replace it", _HINT)
    if _is_home(folder):
        raise OptionError(f"{target} holds checkpoints: --force does not replace them", _HINT)
    entries = sorted(os.listdir(folder))
    if not entries:
        return
    names = _ALWAYS | _rank_files(target, folder)
    for name in entries:
        if name not in names or not is_regular_file(folder / name):
            what = artifact_kind(folder / name)
            shown = f"{name!r} ({what})" if what else f"{name!r}"
            raise OptionError(
                f"{target} holds {shown}, which gopt did not write there: --force would delete it",
                "move it away, or choose another folder with -o",
            )


def _is_home(folder: Path) -> bool:
    return bool(complete_steps(folder)) or is_regular_file(folder / LOCK_FILE)


def _rank_files(target: Path, folder: Path) -> frozenset[str]:
    """Names of rank files in the manifest of a folder, checked as for reading; raises OptionError.

    A command looks at the folder before working and on both sides of the exchange: equal bytes that passed once in this
    process are not checked again.
    """
    path = folder / MANIFEST_FILE
    try:
        data = read_bytes(path, "MANIFEST_BYTES") if is_regular_file(path) else b""
    except (InputError, OSError):
        data = b""
    digest = hashlib.sha256(data).digest()
    if digest not in _valid:
        try:
            manifest, _ = parse_manifest(data, str(path))
        except InputError as error:  # other programs may write a file of this name
            if _format(path) != MANIFEST_FORMAT:
                raise OptionError(f"{target} was not written by gopt: --force does not replace it", _HINT) from None
            fault = error.message.removeprefix(f"{folder}{os.sep}")
            raise OptionError(
                f"{target} is not a valid output folder: --force does not replace it: {fault}",
                f"look at it, and remove it by hand: rm -r {target}",
            ) from error
        files = [name for rank in manifest.ranks for name in (*rank.files.values(), rank.startup or "")]
        optional = frozenset({STARTUP_FILE} if manifest.startup == STARTUP_FILE else ())
        if manifest.pipeline is not None and manifest.pipeline.schedule == SCHEDULE_FILE:
            optional |= {SCHEDULE_FILE}
        _valid.clear()  # one command replaces one folder
        _valid[digest] = optional | frozenset(filter(_RANK.fullmatch, files))
    return _valid[digest]


def _format(path: Path) -> Any:
    record = _read(path)
    return record.get("format") if isinstance(record, dict) else None


def _read(path: Path) -> Any:
    """A JSON document, or None for any other file."""
    try:
        if not is_regular_file(path):
            return None
        data = read_bytes(path, "DOCUMENT_BYTES")
        check_prescan(data, str(path))
        return json.loads(data)
    except (InputError, OSError, ValueError, RecursionError):
        return None
