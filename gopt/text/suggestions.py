"""The nearest known name or file, for errors about a missing one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice

from gopt.text.sanitize import show

MOST = 20_000
"""Names that are compared: each costs some microseconds."""
LISTED = 3
"""Files that a hint lists."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The known name nearest to ``name``, or None."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(islice(choices, MOST)), 1)), None)


def nearest_first(name: str, choices: Iterable[str]) -> list[str]:
    """All known names, nearest to ``name`` first."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=name)

    def similarity(choice: str) -> float:
        matcher.set_seq1(choice)
        return matcher.ratio()

    return sorted(islice(choices, MOST), key=similarity, reverse=True)


def did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    """``did you mean 'loss'?``; None without a near name."""
    close = nearest(name, choices)
    return f"did you mean {show(close)}?" if close is not None else None


def near_file(path: str | os.PathLike[str], *, folders: bool = False) -> tuple[str, ...]:
    """The hint, if any, for a path that does not exist.

    The hint names the first missing folder of the path, else the file with the nearest name, else the nearest of the
    files with the path's suffix. ``folders``: only folders are named."""
    folder, name = os.path.split(os.fsdecode(path).rstrip(os.sep))
    try:
        names = _names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return (f"there is no folder {show(_first_missing(folder))}",)
    except (OSError, ValueError):  # it cannot be read; ValueError: a NUL in the path
        return ()
    if folders:
        names = [name for name in names if os.path.isdir(os.path.join(folder, name))]
    stem, suffix = os.path.splitext(name)
    near = nearest(stem, (os.path.splitext(name)[0] for name in names))  # equal suffixes make no names alike
    if near is not None:
        alike = [name for name in names if os.path.splitext(name)[0] == near]
        return (f"did you mean {show(os.path.join(folder, nearest(name, alike) or alike[0]))}?",)
    if folders:
        return ()
    files = [name for name in names if name.endswith(suffix) and not name.startswith(".")]
    if files:
        nearest_paths = [os.path.join(folder, item) for item in nearest_first(name, files)[:LISTED]]
        return (f"there are {', '.join(map(show, nearest_paths))}",)
    where = f"folder {show(folder)}" if folder else "the current folder"
    return (f"{where} has no {show(suffix)} file" if suffix else f"{where} is empty",)


def files_with_suffix(folder: str, suffix: str) -> list[str]:
    """The paths of a folder's files with a suffix, in order; empty for an unreadable folder."""
    try:
        return [os.path.join(folder, name) for name in _names(folder) if name.endswith(suffix)]
    except (OSError, ValueError):
        return []


def _names(folder: str) -> list[str]:
    """The names in a folder, at most ``MOST``, in order."""
    with os.scandir(folder or os.curdir) as entries:
        return sorted(entry.name for entry in islice(entries, MOST))


def _first_missing(folder: str) -> str:
    """The first part of a path that is not a folder."""
    above = os.path.dirname(folder)
    return _first_missing(above) if above and above != folder and not os.path.isdir(above) else folder
