"""Puts a page on disk: whole or not at all (``docs/disk.md``)."""

from __future__ import annotations

import os
from pathlib import Path

from gopt.artifact.output_paths import check_not_inside, existing, resolve_output
from gopt.errors import OptionError, RunError
from gopt.offline.html_report.page import HEAD, page_text
from gopt.offline.html_report.record import ReportPage
from gopt.system.files import is_regular_file, make_folders, reason
from gopt.system.signals import raise_on_signals
from gopt.system.staging import staged_file

_HINT = "choose another path with --html"


def check_page(target: Path, *, force: bool) -> Path:
    """The real path of a page; raises OptionError where the page may not be written, RunError where it cannot.

    ``force`` replaces a page of gopt, and nothing else."""
    whole = resolve_output(target)
    check_not_inside(target, whole, _HINT)
    if not os.path.lexists(whole):
        return whole
    if not force:
        raise existing(target, "path", "--html", lambda: _check_own(target, whole))
    _check_own(target, whole)
    return whole


def write_page(record: ReportPage, target: Path, *, force: bool) -> int:
    """Write the page of a record; returns the page's bytes. Raises as ``check_page``."""
    whole, data = check_page(target, force=force), page_text(record).encode()
    try:
        make_folders(whole.parent)
        with raise_on_signals(), staged_file(whole) as staged:
            with staged.open() as file:
                file.write(data)
            if force and os.path.lexists(whole):
                staged.commit(lambda old: _check_own(target, old))
            else:
                staged.commit()
    except FileExistsError:
        raise OptionError(f"{target} was created by another command in the meantime", _HINT) from None
    except OSError as error:
        raise RunError(f"cannot write {target}: {reason(error)}", _HINT) from error
    return len(data)


def _check_own(target: Path, path: Path) -> None:
    """Raise OptionError unless this is a page of gopt."""
    if not is_regular_file(path):
        raise OptionError(f"{target} is not a file: --force does not replace it", _HINT)
    with path.open("rb") as file:
        if file.read(len(HEAD)) != HEAD.encode():
            raise OptionError(f"{target} is not a page of gopt report: --force does not replace it", _HINT)
