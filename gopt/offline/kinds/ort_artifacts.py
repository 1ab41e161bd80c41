"""A folder of ONNX Runtime's training artifacts: which of its files is what, and whether they fit each other."""

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
    """The parts of a folder, None for a missing one; ``others``: its other models, such as ``eval_model.onnx``.

    ``notes``: what does not fit, such as parameters without values. ``step``: the training step that they make; None
    where they make none, and ``refusal`` says why.
    """

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
    """Return whether a folder has one of the two graphs, whatever its name."""
    return candidate.is_folder and any(is_ort_training(each) or is_ort_optimizer(each) for each in _files(candidate))


def inspect_ort_artifacts(candidate: FileCandidate) -> OrtArtifactsInspection:
    """Describe the files of a folder; raises InputError for a damaged checkpoint."""
    files = list(_files(candidate))
    training = next((inspect_ort_training(each) for each in files if is_ort_training(each)), None)
    optimizer = next((inspect_ort_optimizer(each) for each in files if is_ort_optimizer(each)), None)
    checkpoint = next((inspect_ort_checkpoint(each) for each in files if is_ort_checkpoint(each)), None)
    named = {part.file for part in (training, optimizer, checkpoint) if part is not None}
    others = tuple(each.path.name for each in files if each.model is not None and each.path.name not in named)
    notes = tuple(_notes(training, optimizer, checkpoint))
    return OrtArtifactsInspection(
        candidate.path.name,
        training and replace(training, next=""), optimizer and replace(optimizer, next=""),
        checkpoint and replace(checkpoint, next=""), others, notes,
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
    held = {each.name: each for each in checkpoint.trainable}
    missing = [each.name for each in training.parameters if each.name not in held]
    if missing:
        yield f"{len(missing)} parameters have no value in the checkpoint, {missing[0]} first"
    wrong = [each.name for each in training.parameters if each.name in held and held[each.name].shape != each.shape]
    if wrong:
        yield f"{len(wrong)} parameters have another shape in the checkpoint, {wrong[0]} first"
    surplus = held.keys() - {each.name for each in training.parameters}
    if surplus:
        yield f"{len(surplus)} trainable values of the checkpoint have no gradient in the graph, {min(surplus)} first"
    states = sum(group.parameters for group in checkpoint.groups)
    if checkpoint.groups and states != len(training.parameters):
        yield f"the checkpoint has optimizer states of {states} parameters, the graph trains {len(training.parameters)}"
