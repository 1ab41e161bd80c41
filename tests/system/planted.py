"""Mistakes of the kind that the sweeps are there for: each must be found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from faults import Fault

import gopt.artifact.model_file as model_file
import gopt.artifact.report_builder as report_builder
import gopt.runtime.training.checkpoint as checkpoint
import gopt.runtime.training.checkpoint_folder as home
import gopt.system.signals as signals
import gopt.system.staging as staged
from gopt.artifact.report_builder import RemovedItems
from gopt.spmd.program import SpmdProgram
from gopt.system.staging import Staged

_PUT = model_file._put_data
_FIND = report_builder.find_removed


def _two_steps(self: Staged, check: Callable[[Path], None]) -> None:
    """The old one goes before the new one comes."""
    check(self.target)
    staged.remove(self.target)
    os.rename(self.path, self.target)


def _in_place(target: Path, data: bytes) -> None:
    number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(number, data)
    os.close(number)


def _old_values_first(data: Staged, target: Path, force: bool) -> bool:
    """The old model's values go before the new model comes."""
    for old in target.parent.glob("*.data"):
        old.unlink()
    return _PUT(data, target, force)


def _any_order(path: Path) -> None:
    """The index goes with the rest, after files of ranks."""
    for each in sorted(path.iterdir(), reverse=True):
        each.unlink()
    path.rmdir()


def _in_a_child(program: SpmdProgram, ranks: Sequence[int]) -> RemovedItems:
    """A child leaves a note in the folder of its command."""
    os.close(os.open("note", os.O_WRONLY | os.O_CREAT))
    return _FIND(program, ranks)


def _plain(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _no_handler() -> AbstractContextManager[Callable[[], None]]:
    """A stop ends the process as the system does."""
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class Plant:
    """A mistake, and where it shows."""

    case: str
    fault: Fault
    make: Callable[[], None]


PLANTS = {
    "two-steps": Plant("shard-force", Fault.KILL, lambda: setattr(Staged, "_replace", _two_steps)),
    "no-sweep": Plant("shard", Fault.KILL, lambda: setattr(staged, "sweep", lambda *_: None)),
    "no-removal": Plant("merge", Fault.FULL, lambda: setattr(Staged, "close", lambda self: None)),
    "no-sync": Plant("shard", Fault.TORN, lambda: setattr(staged, "sync_folder", lambda _: None)),
    "in-place": Plant("resume", Fault.TORN, lambda: setattr(home, "replace_file", _in_place)),
    "old-values-first": Plant("merge-force", Fault.KILL, lambda: setattr(model_file, "_put_data", _old_values_first)),
    "any-order": Plant("resume", Fault.KILL, lambda: setattr(home, "remove_step", _any_order)),
    "no-handler": Plant("reduce", Fault.TERMINATE, lambda: setattr(signals, "raise_on_signals", _no_handler)),
    "a-child-writes": Plant("shard-jobs", Fault.KILL, lambda: setattr(report_builder, "find_removed", _in_a_child)),
    "past-the-layer": Plant("run", Fault.KILL, lambda: setattr(checkpoint, "write_new", _plain)),
}
