"""Loads a training step in any of the forms gopt reads: a model, with ``training_info`` or without, or a folder of
training artifacts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto

from gopt.errors import UnsupportedError
from gopt.ir.external_data import naming
from gopt.ir.graph import Graph
from gopt.ir.load import checked_graph, read_file
from gopt.ir.model_file import ModelFile
from gopt.system.files import digest_of
from gopt.system.garbage import gc_paused

if TYPE_CHECKING:
    from gopt.importers.artifacts.folder import Artifacts

NO_STARTUP = "training_info's initialization is not run, ranks start from the stored values"
"""Begins a note, which says why."""


@dataclass(frozen=True, slots=True)
class StepFile:
    """A step and what it was read from. ``digest``: returns the SHA-256 of the file, or of the files the step is made
    of; ``notes``: remarks on how it was read; ``plain``: whether the file is the step itself, not another form;
    ``startup``: a graph without inputs computing first values, an output of the same name for each."""

    graph: Graph
    digest: Callable[[], bytes]
    nbytes: int
    notes: tuple[str, ...] = ()
    plain: bool = True
    startup: Graph | None = None


def read_step(path: str | os.PathLike[str], *, own: bool = False) -> StepFile | None:
    """Return the step of a model or of a folder of artifacts; None for a folder holding none.

    Raises what ``gopt.ir.load.load`` raises for a plain graph, and InputError and UnsupportedError for artifacts and
    ``training_info`` that are no step.
    """
    if not Path(path).is_dir():
        return _read_model(path, own)
    from gopt.importers.artifacts.step import step_of

    parts = _artifacts(path)
    return None if parts is None else StepFile(step_of(parts), parts.digest, parts.nbytes, plain=False)


def holds_step(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder of artifacts; raises InputError for one that lacks a part."""
    return Path(path).is_dir() and _artifacts(path) is not None


def _artifacts(path: str | os.PathLike[str]) -> Artifacts | None:
    """The parts of a folder of artifacts; what reads them is imported for folders alone."""
    from gopt.importers.artifacts.folder import read_artifacts

    return read_artifacts(Path(path))


def load_file(path: str | os.PathLike[str], *, own: bool = False) -> StepFile:
    """As ``read_step``; a folder without a step is refused as ``load`` refuses it."""
    return read_step(path, own=own) or _read_model(path, own)


def load_step(path: str | os.PathLike[str], *, own: bool = False) -> Graph:
    """Return the graph of ``load_file`` alone."""
    return load_file(path, own=own).graph


def _read_model(path: str | os.PathLike[str], own: bool) -> StepFile:
    name = os.fsdecode(path)
    with naming(name), gc_paused():
        file = read_file(name)
        digest, nbytes = partial(digest_of, Path(path)), Path(path).stat().st_size
        if not file.model.training_info:
            return StepFile(checked_graph(file, name, own=own), digest, nbytes)
        from gopt.importers.training_info import step  # it imports what differentiates: only where it is needed

        converted = step.step_of(file.model)
        startup, notes = None, converted.notes
        if converted.startup is not None:
            try:
                startup = _graph(converted.startup, name)
            except UnsupportedError as error:  # the step itself stands
                notes += (f"{NO_STARTUP}: {error.message}",)
        return StepFile(_graph(converted.model, name), digest, nbytes, notes, plain=False, startup=startup)


def _graph(model: ModelProto, name: str) -> Graph:
    return checked_graph(ModelFile(model.SerializeToString(deterministic=True)), name)
