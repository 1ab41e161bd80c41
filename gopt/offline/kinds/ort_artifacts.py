"""A folder of ONNX Runtime's training artifacts: the role of each file, and whether files fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gopt.documents.records import to_document
from gopt.offline.inspect import Inspection
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.ort_checkpoint import OrtCheckpointInspection, inspect_ort_checkpoint, is_ort_checkpoint
from gopt.offline.kinds.ort_models import (
    OrtOptimizerInspection,
    OrtTrainingInspection,
    inspect_ort_optimizer,
    inspect_ort_training,
    is_ort_optimizer,
    is_ort_training,
)
from gopt.text.notebook import HtmlTable

MOST = 32
"""Files of a folder that are looked at."""
NEXT = "gopt shard takes the folder as a model; gopt import FOLDER -o STEP writes the step alone"


@dataclass(frozen=True, slots=True)
class OrtArtifactsInspection(HtmlTable):
    """The parts of a folder, None for a missing part; ``others``: further models, such as ``eval_model.onnx``.

    ``notes``: misfits, such as parameters without values. ``step``: the resulting training step; without a step None,
    and ``refusal`` says why."""

    folder: str
    training: OrtTrainingInspection | None
    optimizer: OrtOptimizerInspection | None
    checkpoint: OrtCheckpointInspection | None
    others: tuple[str, ...]
    notes: tuple[str, ...]
    step: Inspection | None = None
    refusal: str = ""
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        parts = {
            "training": self.training, "optimizer": self.optimizer, "checkpoint": self.checkpoint, "step": self.step,
        }  # fmt: skip
        return {
            "format": "gopt-inspection/1", "what": "ort_artifacts", **to_document(self),
            **{name: part and part.to_json() for name, part in parts.items()},
        }  # fmt: skip


def is_ort_artifacts(candidate: FileCandidate) -> bool:
    """Return whether a folder has one of the two graphs, under any name."""
    return candidate.is_folder and any(is_ort_training(file) or is_ort_optimizer(file) for file in _files(candidate))


def inspect_ort_artifacts(candidate: FileCandidate) -> OrtArtifactsInspection:
    """Describe the files of a folder; raises InputError for a damaged checkpoint."""
    files = list(_files(candidate))
    training = next((inspect_ort_training(file) for file in files if is_ort_training(file)), None)
    optimizer = next((inspect_ort_optimizer(file) for file in files if is_ort_optimizer(file)), None)
    checkpoint = next((inspect_ort_checkpoint(file) for file in files if is_ort_checkpoint(file)), None)
    named = {part.file for part in (training, optimizer, checkpoint) if part is not None}
    unused = tuple(file.path.name for file in files if file.model is not None and file.path.name not in named)
    notes = tuple(_notes(training, optimizer, checkpoint))
    return OrtArtifactsInspection(
        candidate.path.name,
        training and replace(training, next=""), optimizer and replace(optimizer, next=""),
        checkpoint and replace(checkpoint, next=""), unused, notes,
    )  # fmt: skip


def _files(candidate: FileCandidate) -> Iterator[FileCandidate]:
    paths = sorted(path for path in candidate.path.iterdir() if path.is_file())
    return (FileCandidate(path) for path in paths[:MOST])


def _notes(
    training: OrtTrainingInspection | None, optimizer: OrtOptimizerInspection | None,
    checkpoint: OrtCheckpointInspection | None,
) -> Iterator[str]:  # fmt: skip
    """Yield missing parts and inconsistencies."""
    parts = {"training graph": training, "optimizer graph": optimizer, "checkpoint": checkpoint}
    lacking = [name for name, part in parts.items() if part is None]
    if lacking:
        yield f"no {' and no '.join(lacking)} here"
    if training is None or checkpoint is None:
        return
    values = {value.name: value for value in checkpoint.trainable}
    missing = [parameter.name for parameter in training.parameters if parameter.name not in values]
    if missing:
        yield f"{len(missing)} parameters have no value in the checkpoint, {missing[0]} first"
    wrong = [
        parameter.name
        for parameter in training.parameters
        if parameter.name in values and values[parameter.name].shape != parameter.shape
    ]
    if wrong:
        yield f"{len(wrong)} parameters have another shape in the checkpoint, {wrong[0]} first"
    surplus = values.keys() - {parameter.name for parameter in training.parameters}
    if surplus:
        yield f"{len(surplus)} trainable values of the checkpoint have no gradient in the graph, {min(surplus)} first"
    states = sum(group.parameters for group in checkpoint.groups)
    if checkpoint.groups and states != len(training.parameters):
        yield f"the checkpoint has optimizer states of {states} parameters, the graph trains {len(training.parameters)}"
