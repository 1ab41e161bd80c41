"""``gopt-golden.toml`` and the files beside it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gopt import documents
from gopt.disk.files import is_regular_file
from gopt.disk.staging import replace_file
from gopt.errors import InputError, OptionError, RunError
from gopt.offline.goldens.golden_text import FIRST_LINE, Asked

CONFIG_FILE = "gopt-golden.toml"
SUFFIX = ".golden.txt"


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """A model, relative to the folder, and what is asked of it."""

    name: str
    model: Path
    asked: Asked


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """What differs: lines of unified diffs, goldens that are missing, and files that no case asks for."""

    differing: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.extra)

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1


def read_cases(folder: Path) -> list[GoldenCase]:
    """The cases of a folder. Raises OptionError where it has no configuration, InputError for a malformed one."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise OptionError(f"there is no {path}", "docs/golden.md shows one")
    table = documents.read_toml(path, documents.GOLDEN)
    return [
        GoldenCase(name, folder / case["model"], Asked(case.get("command", "shard"), tuple(case["options"])))
        for name, case in sorted(table["case"].items())
    ]


def check_goldens(folder: Path, texts: Mapping[str, str]) -> GoldenCheck:
    """Compare the goldens of a folder with ``texts``, case -> golden."""
    differing: dict[str, tuple[str, ...]] = {}
    missing: list[str] = []
    for name, text in texts.items():
        path = folder / f"{name}{SUFFIX}"
        if not path.is_file():
            missing.append(path.name)
        elif (old := _read(path)) != text:
            lines = difflib.unified_diff(
                old.splitlines(), text.splitlines(), f"{path.name} (golden)", f"{path.name} (now)", n=1, lineterm=""
            )
            differing[path.name] = tuple(lines)
    return GoldenCheck(differing, tuple(missing), tuple(path.name for path in _extra(folder, texts)))


def update_goldens(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write the goldens, each whole or not at all; returns what changed, a line each. Raises RunError.

    Files of cases that are gone are removed, but only those that gopt wrote.
    """
    done: list[str] = []
    for name, text in texts.items():
        path = folder / f"{name}{SUFFIX}"
        old = _read(path) if path.is_file() else None
        if old == text:
            continue
        if old is not None and not old.startswith(FIRST_LINE):
            raise RunError(f"{path} is no golden of gopt", "move it away, or give the case another name")
        replace_file(path, text.encode())
        done.append(f"{'added' if old is None else 'changed'} {path.name}")
    for path in _extra(folder, texts):
        path.unlink()
        done.append(f"removed {path.name}")
    return done


def _read(path: Path) -> str:
    try:
        return documents.read_bytes(path, documents.GOLDEN.most).decode()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None


def _extra(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Goldens that gopt wrote and no case asks for."""
    return [
        path
        for path in sorted(folder.glob(f"*{SUFFIX}"))
        if path.name.removesuffix(SUFFIX) not in texts and is_regular_file(path) and _read(path).startswith(FIRST_LINE)
    ]
