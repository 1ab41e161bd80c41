"""A model with ``training_info``: ONNX's own form of a step, with an algorithm beside the inference graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gopt import api
from gopt.documents.records import to_document
from gopt.errors import GoptError
from gopt.ir.nodes import is_gradient
from gopt.offline.kinds.candidate import FileCandidate
from gopt.text.notebook import HtmlTable

NEXT = "gopt shard MODEL --ranks N shards it: algorithm and update_binding are read as one step"
REFUSED = "correct what is refused, or write the step as one plain graph: new states as outputs"


@dataclass(frozen=True, slots=True)
class TrainingStepEntry:
    """One entry. ``updates``: initializer -> the new value; ``initialized``: initializers set by the initialization;
    ``differentiates``: values by which a Gradient operator takes derivatives."""

    nodes: int
    operators: Mapping[str, int]
    updates: Mapping[str, str]
    initialized: tuple[str, ...]
    differentiates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainingInfoInspection(HtmlTable):
    """An inference graph of ``nodes`` nodes with training steps beside it. ``refusal``: why gopt does not shard the
    model, or ''; ``parameters``, ``loss``: of the step read by gopt, 0 and '' for a refused model."""

    file: str
    file_bytes: int
    nodes: int
    initializers: int
    steps: tuple[TrainingStepEntry, ...]
    parameters: int
    loss: str
    refusal: str
    notes: tuple[str, ...]
    next: str = NEXT

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "training_info"} | to_document(self)


def has_training_info(candidate: FileCandidate) -> bool:
    return candidate.model is not None and len(candidate.model.training_info) > 0


def inspect_training_info(candidate: FileCandidate) -> TrainingInfoInspection:
    """Describe the entries of a model's ``training_info``."""
    model = candidate.model
    assert model is not None
    steps = []
    for info in model.training_info:
        nodes = info.algorithm.node
        gradients = [node for node in nodes if is_gradient(node)]
        steps.append(
            TrainingStepEntry(
                nodes=len(nodes),
                operators=dict(Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes).most_common()),
                updates={entry.key: entry.value for entry in info.update_binding},
                initialized=tuple(entry.key for entry in info.initialization_binding),
                differentiates=tuple(
                    name.decode("utf-8", "replace") for node in gradients for attribute in node.attribute
                    if attribute.name == "xs" for name in attribute.strings
                ),
            )
        )  # fmt: skip
    notes = []
    if any(step.differentiates for step in steps):
        notes.append("the Gradient operator says what to differentiate: gopt writes that backward (gopt[derive])")
    parameters, loss, refusal = 0, "", ""
    try:
        training = api.load(candidate.path).training
        parameters, loss = len(training.gradients), ", ".join(training.losses)
        notes += training.notes
    except GoptError as error:
        refusal = error.message
        notes.append(f"gopt does not shard it: {refusal}")
    return TrainingInfoInspection(
        candidate.path.name, candidate.size, len(model.graph.node), len(model.graph.initializer), tuple(steps),
        parameters, loss, refusal, tuple(notes), REFUSED if refusal else NEXT,
    )  # fmt: skip
