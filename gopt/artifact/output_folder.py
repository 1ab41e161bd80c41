"""Writes an output folder so that it appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gopt.artifact.output_paths import check_output_folder, check_replaceable, check_resolved_folder
from gopt.errors import OptionError, RunError
from gopt.system.background import held
from gopt.system.files import make_folders, reason
from gopt.system.signals import raise_on_signals
from gopt.system.staging import DisplacedTargetError, Staged, staged_folder


@contextmanager
def output_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a folder beside ``target`` that atomically replaces ``target`` at the end of the block; an error removes
    the folder.

    Raises OptionError if the target exists and ``force`` is not given, or if it contains foreign files; RunError for a
    failed write; StoppedError for a signal to end.
    """
    whole = check_output_folder(target, force=force)
    with held(), replaced_folder(target, whole, lambda old: check_replaceable(target, old)) as staged:
        yield staged
        if os.path.lexists(whole):
            check_resolved_folder(target, whole, force=force)


@contextmanager
def replaced_folder(target: Path, whole: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a folder that atomically replaces ``target`` at the end of the block; an error removes the folder.

    ``whole``: the path of ``target`` without links. ``check`` gets the current path of an old folder, and raises if it
    may not be replaced. Raises OptionError, RunError and StoppedError as ``output_folder``.
    """
    draft = whole
    try:
        make_folders(whole.parent)
        with raise_on_signals(), staged_folder(whole) as staged:
            draft = staged.path
            yield draft
            if os.path.lexists(whole):
                staged.commit(check)
            else:
                _put_new(staged, target)
    except DisplacedTargetError as error:
        hint = f"the old folder is complete: mv {error.filename} {target}, or let the next run put it back"
        raise RunError(f"cannot write {target}: {reason(error)}", hint) from error
    except OSError as error:
        remains = draft != whole and os.path.lexists(draft)
        hint = f"remove {draft}, or let the next run do so" if remains else "nothing was left behind"
        raise RunError(f"cannot write {target}: {reason(error)}", hint) from error


def _put_new(staged: Staged, target: Path) -> None:
    try:
        staged.commit()
    except FileExistsError:
        raise OptionError(
            f"{target} was created by another command in the meantime", "run this command again"
        ) from None
