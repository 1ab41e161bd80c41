"""Kinds of ranks of a mesh: ranks alike but for the numbers of peers, which have one file while they are proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gopt.artifact.manifest_entries import RankEntry

KIND_FILES = "kind_*.onnx"
"""The files of kinds, which are gone when the folder is there."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """All ranks of a mesh. ``peers``: of ranks that were not written, phase -> the rank whose peers the file names;
    another rank's are as far from it."""

    entries: tuple[RankEntry, ...]
    peers: Mapping[int, Mapping[str, int]]
