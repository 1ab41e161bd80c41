"""``gopt-golden.toml`` and the folder of goldens beside it, which is replaced as a whole."""

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
    """The golden of the case has these sections instead of those of the top."""


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
    """A model, relative to the folder, what is asked of it, and the sections that its golden has."""

    name: str
    model: Path
    asked: CaseRequest
    keep: tuple[str, ...] = SECTIONS


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """Differences: lines of unified diffs, goldens that are missing, and goldens that no case asks for."""

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
    """The lines of ``update_goldens`` as JSON: files by what became of them."""
    found: dict[str, Any] = {"format": "gopt-golden-update/1", "added": [], "changed": [], "removed": []}
    for line in changed:
        what, _, file = line.partition(" ")
        found[what].append(file.removeprefix(f"{FOLDER}/"))
    return found


def only_folder() -> Path:
    """The one folder with a configuration of goldens, the current one or below it; hidden folders are left out.

    Raises InputError where there is none, OptionError where there are several.
    """
    found = []
    for place, folders, files in os.walk("."):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each != "node_modules")
        if CONFIG_FILE in files:
            found.append(os.path.normpath(place))
    if not found:
        raise InputError(f"no folder here has a {CONFIG_FILE}", "name it; gopt help golden shows one")
    if len(found) > 1:
        raise OptionError(f"several folders have a {CONFIG_FILE}: {listed(found)}", "name one of them")
    return Path(found[0])


def read_cases(folder: Path) -> list[GoldenCase]:
    """The cases of a folder. Raises InputError where it has no configuration, or a malformed one."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"there is no {path}", "give the folder that holds it; gopt help golden shows one")
    table = from_document(GoldenConfig, documents.read_toml(path, documents.GOLDEN))
    found = []
    for name, case in sorted(table.cases.items()):
        if not _NAME.fullmatch(name):
            raise InputError(f"{path}: case: {show(name)} names no file", "letters, digits, - and _ do")
        keep = table.keep if case.keep is None else case.keep
        asked = CaseRequest(case.command, case.options)
        found.append(GoldenCase(name, folder / case.model, asked, tuple(each for each in SECTIONS if each in keep)))
    return found


def check_goldens(folder: Path, texts: Mapping[str, str]) -> GoldenCheck:
    """Compare the goldens of a folder with ``texts``, case -> golden. Raises InputError, RunError."""
    held = _read_goldens(folder / FOLDER)
    wanted = _wanted(texts)
    differing = {}
    for name, text in wanted.items():
        if name in held and held[name] != text:
            differing[name] = tuple(
                difflib.unified_diff(
                    held[name].splitlines(), text.splitlines(), f"{FOLDER}/{name}", f"{FOLDER}/{name} (now)", n=1,
                    lineterm="",
                )
            )  # fmt: skip
    missing, extra = (wanted.keys() - held.keys(), held.keys() - wanted.keys())
    return GoldenCheck(differing, tuple(sorted(missing)), tuple(sorted(extra)))


def update_goldens(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Replace all goldens of a folder in one step; returns what changed, a line each.

    The old set stands there or the new one, whenever the process dies. Raises OptionError where the folder of goldens
    holds what gopt did not write, RunError where it cannot be written.
    """
    target = folder / FOLDER
    sweep(folder, target)  # also where nothing is to be written: what a dead process left goes, or comes back
    held = _read_goldens(target)
    wanted = _wanted(texts)
    if held == wanted and target.is_dir():
        return []
    with replaced_folder(target, target, lambda old: _check_replaceable(target, old)) as staged:
        for name, text in wanted.items():
            write_new(staged / name, text.encode())
    names = sorted({*held, *wanted})
    return [
        f"{'added' if name not in held else 'changed' if name in wanted else 'removed'} {FOLDER}/{name}"
        for name in names
        if held.get(name) != wanted.get(name)
    ]


def _check_replaceable(target: Path, old: Path) -> None:
    """Raises OptionError for what gopt did not write; ``old`` is the path that ``target`` has now."""
    if old.is_symlink() or not old.is_dir():
        raise OptionError(f"{target} is not a folder", "move it away: gopt keeps its goldens under this name")
    for path in sorted(old.iterdir()):
        if not is_regular_file(path) or path.suffix != SUFFIX or not _read(path).startswith(FIRST_LINE):
            raise OptionError(f"{target / path.name} was not written by gopt golden", "move it out of this folder")


def _wanted(texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}{SUFFIX}": text for name, text in texts.items()}


def _read_goldens(folder: Path) -> dict[str, str]:
    """The goldens that stand there, by the names of their files."""
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
