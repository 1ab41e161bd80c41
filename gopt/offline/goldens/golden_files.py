"""``gopt-golden.toml`` and the folder of goldens beside the file, replaced as a whole."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from gopt import documents
from gopt.artifact.output_folder import replaced_folder
from gopt.documents.records import OPTIONAL, Name, from_document, key, one_of
from gopt.errors import InputError, OptionError, RunError
from gopt.offline.goldens.golden_text import FIRST_LINE, SECTIONS, CaseRequest
from gopt.system.files import is_regular_file, reason, write_new
from gopt.system.staging import sweep
from gopt.text.sanitize import listed, show

CONFIG_FILE = "gopt-golden.toml"
FOLDER = "golden"
"""Where the goldens are, below the folder of the configuration: all that is in it is gopt's."""
SUFFIX = ".txt"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


Sections = tuple[Annotated[str, one_of(*SECTIONS)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """A model and the request for it."""

    model: Name
    """The path of the model is relative to the folder."""
    command: Annotated[str, one_of("shard", "split")] = field(default="shard", metadata=OPTIONAL)
    """The command is shard, which is the default, or split."""
    options: tuple[str, ...]
    """The options of the command stand here as they are typed, one word an item."""
    keep: Sections | None = field(default=None, metadata=OPTIONAL)
    """The golden of the case has these sections instead of the sections at the top."""


@dataclass(frozen=True, slots=True)
class GoldenConfig:
    """The file gopt-golden.toml names the models whose goldens lie beside it."""

    cases: Mapping[str, CaseTable] = field(metadata=key("case"))
    """The table has one case for every golden, a model and the request for it; its key is the stem of the golden's
    file."""
    keep: Sections = field(default=SECTIONS, metadata=OPTIONAL)
    """Goldens have these sections; all of them where the key is left out."""


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """A model, relative to the folder, the request, and the sections of the golden."""

    name: str
    model: Path
    asked: CaseRequest
    keep: tuple[str, ...] = SECTIONS


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """Differences: lines of unified diffs, missing goldens, and goldens of no case."""

    differing: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.extra)

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "gopt-golden-check/1",
            "equal": self.equal,
            "differing": {name: list(lines) for name, lines in self.differing.items()},
            "missing": list(self.missing),
            "extra": list(self.extra),
        }


def changes_to_json(changed: Sequence[str]) -> dict[str, Any]:
    """The lines of ``update_goldens`` as JSON: files by kind of change."""
    changes: dict[str, Any] = {"format": "gopt-golden-update/1", "added": [], "changed": [], "removed": []}
    for line in changed:
        what, _, file = line.partition(" ")
        changes[what].append(file.removeprefix(f"{FOLDER}/"))
    return changes


def only_folder() -> Path:
    """The one folder with a configuration of goldens, at the current folder or below; hidden folders are left out.

    Raises InputError without a folder, OptionError for several."""
    targets = []
    for folder, folders, files in os.walk("."):
        folders[:] = sorted(folder for folder in folders if not folder.startswith(".") and folder != "node_modules")
        if CONFIG_FILE in files:
            targets.append(os.path.normpath(folder))
    if not targets:
        raise InputError(f"no folder here has a {CONFIG_FILE}", "name it; gopt help golden shows one")
    if len(targets) > 1:
        raise OptionError(f"several folders have a {CONFIG_FILE}: {listed(targets)}", "name one of them")
    return Path(targets[0])


def read_cases(folder: Path) -> list[GoldenCase]:
    """The cases of a folder. Raises InputError for a missing or malformed configuration."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"there is no {path}", "give the folder that holds it; gopt help golden shows one")
    table = from_document(GoldenConfig, documents.read_toml(path, documents.GOLDEN))
    cases = []
    for name, case in sorted(table.cases.items()):
        if not _NAME.fullmatch(name):
            raise InputError(f"{path}: case: {show(name)} names no file", "letters, digits, - and _ do")
        keep = table.keep if case.keep is None else case.keep
        request = CaseRequest(case.command, case.options)
        cases.append(
            GoldenCase(name, folder / case.model, request, tuple(section for section in SECTIONS if section in keep))
        )
    return cases


def check_goldens(folder: Path, texts: Mapping[str, str]) -> GoldenCheck:
    """Compare the goldens of a folder with ``texts``, case -> golden. Raises InputError, RunError."""
    goldens = _read_goldens(folder / FOLDER)
    wanted = _wanted(texts)
    differing = {}
    for name, text in wanted.items():
        if name in goldens and goldens[name] != text:
            differing[name] = tuple(
                difflib.unified_diff(
                    goldens[name].splitlines(), text.splitlines(), f"{FOLDER}/{name}", f"{FOLDER}/{name} (now)", n=1,
                    lineterm="",
                )
            )  # fmt: skip
    missing, extra = (wanted.keys() - goldens.keys(), goldens.keys() - wanted.keys())
    return GoldenCheck(differing, tuple(sorted(missing)), tuple(sorted(extra)))


def update_goldens(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Replace all goldens of a folder in one step; returns a line for each change.

    The old set or the new one is there, whenever the process dies. Raises OptionError for foreign files in the folder
    of goldens, RunError where the folder cannot be written."""
    target = folder / FOLDER
    sweep(folder, target)  # also where nothing is to be written: what a dead process left goes, or comes back
    goldens = _read_goldens(target)
    wanted = _wanted(texts)
    if goldens == wanted and target.is_dir():
        return []
    with replaced_folder(target, target, lambda old: _check_replaceable(target, old)) as staged:
        for name, text in wanted.items():
            write_new(staged / name, text.encode())
    names = sorted({*goldens, *wanted})
    return [
        f"{'added' if name not in goldens else 'changed' if name in wanted else 'removed'} {FOLDER}/{name}"
        for name in names
        if goldens.get(name) != wanted.get(name)
    ]


def _check_replaceable(target: Path, old: Path) -> None:
    """Raises OptionError for foreign files; ``old``: the present path of ``target``."""
    if old.is_symlink() or not old.is_dir():
        raise OptionError(f"{target} is not a folder", "move it away: gopt keeps its goldens under this name")
    for path in sorted(old.iterdir()):
        if not is_regular_file(path) or path.suffix != SUFFIX or not _read(path).startswith(FIRST_LINE):
            raise OptionError(f"{target / path.name} was not written by gopt golden", "move it out of this folder")


def _wanted(texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}{SUFFIX}": text for name, text in texts.items()}


def _read_goldens(folder: Path) -> dict[str, str]:
    """The present goldens, by file name."""
    if not os.path.lexists(folder):
        return {}
    try:
        _check_replaceable(folder, folder)
        return {path.name: _read(path) for path in sorted(folder.iterdir())}
    except OSError as error:
        raise RunError(f"cannot read {folder}: {reason(error)}") from error


def _read(path: Path) -> str:
    try:
        return documents.read_bytes(path, documents.GOLDEN.limit).decode()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text", "save it as UTF-8") from None
