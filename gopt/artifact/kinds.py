"""Kinds of ranks of a mesh: ranks alike but for the numbers of peers share a file during the proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gopt.artifact.manifest_entries import RankEntry

KIND_FILES = "kind_*.onnx"
"""The files of kinds, deleted before the folder is there."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """All ranks of a mesh. ``peers``: rank without a file -> phase -> the rank with the peers in the file; peers of
    further ranks are as far from them."""

    entries: tuple[RankEntry, ...]
    peers: Mapping[int, Mapping[str, int]]
