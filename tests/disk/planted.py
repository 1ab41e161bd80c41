"""Mistakes of the kind that the sweeps are there for: each must be found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gopt.disk.draft as draft
import gopt.runtime.training.checkpoint as checkpoint
import gopt.runtime.training.home as home
import gopt.write.model_file as model_file
from gopt.disk.draft import Draft


def _two_steps(self: Draft, check: Callable[[Path], None]) -> None:
    """The old one goes before the new one comes."""
    check(self.target)
    draft.remove(self.target)
    os.rename(self.path, self.target)


def _in_place(target: Path, data: bytes) -> None:
    number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(number, data)
    os.close(number)


def _values_first(target: Path, digest: str) -> str:
    """Old and new values have one name."""
    return f"{target.name}.data"


def _any_order(path: Path) -> None:
    """The index goes with the rest, after files of ranks."""
    for each in sorted(path.iterdir(), reverse=True):
        each.unlink()
    path.rmdir()


def _plain(path: Path, data: bytes) -> None:
    path.write_bytes(data)


PLANTS: dict[str, Callable[[], None]] = {
    "two-steps": lambda: setattr(Draft, "_replace", _two_steps),
    "no-sweep": lambda: setattr(draft, "sweep", lambda *_: None),
    "no-removal": lambda: setattr(Draft, "close", lambda self: None),
    "in-place": lambda: setattr(home, "put_file", _in_place),
    "values-first": lambda: setattr(model_file, "data_name", _values_first),
    "any-order": lambda: setattr(home, "remove_step", _any_order),
    "past-the-layer": lambda: setattr(checkpoint, "write_new", _plain),
    "no-sync": lambda: setattr(draft, "sync_folder", lambda _: None),
}
