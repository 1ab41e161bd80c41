"""The files of a folder of training artifacts, recognised by content and not by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from onnx import ModelProto, NodeProto

from gopt.errors import GoptError, InputError
from gopt.importers.artifacts.checkpoint import IDENTIFIER, OrtCheckpoint, read_checkpoint
from gopt.ir.external_data import naming
from gopt.ir.functions import check_functions
from gopt.ir.load import read_file
from gopt.text.sanitize import show

DOMAIN = "com.microsoft"
ACCUMULATOR = "InPlaceAccumulatorV2"
OPTIMIZERS = ("AdamWOptimizer", "SGDOptimizerV2")
T = TypeVar("T", "ArtifactFile", Path)
CHECKPOINT = "checkpoint"
MOST = 32
"""Files of a folder that are looked at."""


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A model of the folder."""

    path: Path
    model: ModelProto


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The parts of a folder."""

    folder: Path
    training: ArtifactFile
    optimizer: ArtifactFile
    checkpoint: OrtCheckpoint

    @property
    def files(self) -> tuple[Path, ...]:
        """The files a step is made of."""
        return (self.training.path, self.optimizer.path, self.checkpoint.path)

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def digest(self) -> bytes:
        """SHA-256 of the digests of the files in order, so no byte can move between files."""
        whole = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.digest()


def is_training(model: ModelProto) -> bool:
    """Return whether a model adds gradients to buffers."""
    return next(of_type(model, ACCUMULATOR), None) is not None


def is_optimizer(model: ModelProto) -> bool:
    """Return whether a model has an optimizer with sequences; an optimizer with tensors is part of a step."""
    if next(of_type(model, *OPTIMIZERS), None) is None:
        return False
    return any(value.type.HasField("sequence_type") for value in model.graph.input)


def of_type(model: ModelProto, *op_types: str) -> Iterator[NodeProto]:
    """Nodes of ONNX Runtime's own operators."""
    return (node for node in model.graph.node if node.op_type in op_types and node.domain == DOMAIN)


def read_artifacts(folder: Path) -> Artifacts | None:
    """The training graph, the optimizer graph and the checkpoint of a folder; None without any graph, and without a
    checkpoint beside a damaged file.

    Raises InputError for a missing or repeated part, or a damaged file.
    """
    scan = _scan(folder)
    training = [file for file in scan.models if is_training(file.model)]
    optimizer = [file for file in scan.models if is_optimizer(file.model)]
    if not training and not optimizer and not (scan.checkpoints and scan.damaged):
        return None
    used = {file.path for file in (*training, *optimizer)} | {*scan.checkpoints}
    scan.others.extend(path for path in scan.files if path not in used)
    graphs = (_one(scan, "training graph", training), _one(scan, "optimizer graph", optimizer))
    checkpoint = _one(scan, CHECKPOINT, scan.checkpoints)
    for model_file in graphs:
        with naming(str(model_file.path)):
            check_functions(model_file.model)
    return Artifacts(folder, *graphs, read_checkpoint(checkpoint))


@dataclass(frozen=True, slots=True)
class _Scan:
    """The files of a folder. ``damaged``: the error of a damaged model file; ``others``: unrelated files."""

    folder: Path
    files: list[Path]
    models: list[ArtifactFile] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)
    damaged: dict[Path, GoptError] = field(default_factory=dict)
    others: list[Path] = field(default_factory=list)


def _scan(folder: Path) -> _Scan:
    scan = _Scan(folder, sorted(path for path in folder.iterdir() if path.is_file())[:MOST])
    for path in scan.files:
        head = _head(path)
        if head[4:8] == IDENTIFIER:
            scan.checkpoints.append(path)
        elif head[:1] == b"\x08":  # the tag of ir_version, which ONNX Runtime writes first
            try:
                scan.models.append(ArtifactFile(path, read_file(str(path)).model))
            except GoptError as error:
                scan.damaged[path] = error
    return scan


def _one(scan: _Scan, what: str, choices: list[T]) -> T:
    if not choices:
        parts = "artifacts are a training graph, an optimizer graph and a checkpoint"
        damaged = [f"{show(path.name)} {error.message}" for path, error in scan.damaged.items()]
        if damaged and what != CHECKPOINT:  # a file that is there is not missing
            path, error = next(iter(scan.damaged.items()))
            raise InputError(f"{path}: {error.message}", f"without it there is no {what}: {parts}", *damaged[1:])
        names = ", ".join(show(path.name) for path in scan.others if path not in scan.damaged)
        hints = (f"gopt finds no part of a step in {names}",) if names else ()
        raise InputError(f"{scan.folder}: no {what} here", *damaged, *hints, parts)
    if len(choices) > 1:
        names = ", ".join(sorted((entry if isinstance(entry, Path) else entry.path).name for entry in choices))
        raise InputError(f"{scan.folder}: {len(choices)} files are a {what}: {names}", "keep one of them in the folder")
    return choices[0]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", "let this user read it") from error
