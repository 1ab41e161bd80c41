"""Loads a training step in any of the forms that gopt reads: a model, or a folder of training artifacts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gopt.disk.files import digest_of
from gopt.importers.artifacts.folder import read_artifacts
from gopt.importers.artifacts.step import step_of
from gopt.ir.graph import Graph
from gopt.ir.load import load


@dataclass(frozen=True, slots=True)
class StepFile:
    """A step and what it was read from. ``digest``: SHA-256 of the file, or of the files that the step is made of."""

    graph: Graph
    digest: bytes
    nbytes: int


def read_step(path: str | os.PathLike[str], *, own: bool = False) -> StepFile | None:
    """Return the step of a model or of a folder of artifacts; None for a folder that holds none.

    Raises what ``gopt.ir.load.load`` raises, and InputError and UnsupportedError for artifacts that are no step.
    """
    place = Path(path)
    if not place.is_dir():
        return StepFile(load(path, own=own), digest_of(place), place.stat().st_size)
    parts = read_artifacts(place)
    return None if parts is None else StepFile(step_of(parts), parts.digest(), parts.nbytes)


def holds_step(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder of artifacts; raises InputError for one that lacks a part."""
    return Path(path).is_dir() and read_artifacts(Path(path)) is not None


def load_step(path: str | os.PathLike[str], *, own: bool = False) -> Graph:
    """Return the graph alone; a folder without a step is refused as ``load`` refuses it."""
    parts = read_artifacts(Path(path)) if Path(path).is_dir() else None
    return load(path, own=own) if parts is None else step_of(parts)
