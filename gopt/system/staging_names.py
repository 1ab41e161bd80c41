"""Names of drafts: recognisable as gopt's own, and not predictable.

``.step.ranks.gopt-4f0c19….new`` is the draft of ``step.ranks``, and then the old target; ``.old`` is the old target
where two names cannot be exchanged: it alone may be needed."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NEW, OLD = "new", "old"
_LONGEST = 200
"""Bytes of a target's name that fit in a draft's: file systems take 255."""
_DRAFT = re.compile(r"\.(.+)\.gopt-[0-9a-f]{16}\.(new|old)", re.DOTALL)


def fresh_name(target: Path, kind: str = NEW) -> Path:
    """A random name beside the target."""
    return target.with_name(f".{_short(target.name)}.gopt-{secrets.token_hex(8)}.{kind}")


@dataclass(frozen=True, slots=True)
class StagedEntry:
    """A draft found in a folder."""

    path: Path
    kind: str
    target: Path


def find_staged(folder: Path, target: Path | None = None) -> list[StagedEntry]:
    """Drafts of one target, or of all in a folder; ``.old`` ones first. Raises OSError."""
    wanted = None if target is None else _short(target.name)
    result = []
    for name in os.listdir(folder):
        match = _DRAFT.fullmatch(name)
        if match and wanted in (None, match[1]):
            result.append(StagedEntry(folder / name, match[2], target or folder / match[1]))
    return sorted(result, key=lambda item: (item.kind != OLD, item.path))


def displaced_copies(target: Path) -> list[Path]:
    """Return the paths of old targets moved aside by a process before it died."""
    with suppress(OSError):
        return [item.path for item in find_staged(target.parent, target) if item.kind == OLD]
    return []


def _short(name: str) -> str:
    data = os.fsencode(name)
    return name if len(data) <= _LONGEST else hashlib.sha256(data).hexdigest()
