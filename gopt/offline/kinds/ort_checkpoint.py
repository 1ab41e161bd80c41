"""Describes a training checkpoint of ONNX Runtime: tensors and properties, without values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gopt.documents.records import to_document
from gopt.importers.artifacts.checkpoint import IDENTIFIER, OptimizerGroup, Stored, read_checkpoint
from gopt.offline.inspect import NamedValue
from gopt.offline.kinds.candidate import FileCandidate
from gopt.text.notebook import HtmlTable

NEXT = "it holds values for the training_model.onnx beside it: gopt inspect FOLDER shows both"


@dataclass(frozen=True, slots=True)
class OrtGroup:
    """Parameters of one optimizer. ``states``: the number of tensors of each, ``bytes`` of all."""

    name: str
    step: int
    learning_rate: float
    parameters: int
    states: int
    bytes: int


@dataclass(frozen=True, slots=True)
class OrtCheckpointInspection(HtmlTable):
    """A checkpoint.

    ``nominal``: tensors are named without values; ``external``: the values are in a file beside the checkpoint."""

    file: str
    file_bytes: int
    version: int
    trainable: tuple[NamedValue, ...]
    frozen: tuple[NamedValue, ...]
    groups: tuple[OrtGroup, ...]
    properties: dict[str, int | float | str]
    nominal: bool
    external: bool
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "ort_checkpoint"} | to_document(self)


def is_ort_checkpoint(candidate: FileCandidate) -> bool:
    return candidate.head[4:8] == IDENTIFIER


def inspect_ort_checkpoint(candidate: FileCandidate) -> OrtCheckpointInspection:
    """Describe a checkpoint; raises InputError for a damaged one."""
    checkpoint = read_checkpoint(candidate.path)
    return OrtCheckpointInspection(
        file=candidate.path.name,
        file_bytes=candidate.size,
        version=checkpoint.version,
        trainable=tuple(map(_named, checkpoint.trainable)),
        frozen=tuple(map(_named, checkpoint.frozen)),
        groups=tuple(map(_group, checkpoint.groups)),
        properties=checkpoint.properties,
        nominal=checkpoint.nominal,
        external=checkpoint.external,
    )


def _named(stored: Stored) -> NamedValue:
    return NamedValue(stored.name, stored.type.dtype, stored.type.shape, stored.nbytes)


def _group(group: OptimizerGroup) -> OrtGroup:
    states = [parameter.states for parameter in group.parameters]
    return OrtGroup(
        group.name, group.step, group.learning_rate, len(states), max(map(len, states), default=0),
        sum(tensor.nbytes for state in states for tensor in state),
    )  # fmt: skip
