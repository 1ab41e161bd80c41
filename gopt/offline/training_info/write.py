"""A step, or ranks of a step, into one model with ``training_info``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.documents.records import key, to_document
from gopt.offline.folder_contents import step_at
from gopt.offline.inference.forward import forward_only
from gopt.offline.merge import save_model
from gopt.offline.training_info.division import divide
from gopt.offline.training_info.model import training_model


@dataclass(frozen=True, slots=True)
class TrainingInfo:
    """Result of ``merge_training_info``.

    ``nodes``, ``inputs``, ``outputs``: of the inference graph; ``algorithm``: nodes of the algorithm; ``fed``: the
    algorithm's inputs; ``states``: initializers replaced by a step; ``initialized``: states with first values from a
    graph; ``twice``: values computed in evaluation and training, each with the name in the algorithm."""

    model: str
    data: str
    nbytes: int = field(metadata=key("bytes"))
    nodes: int
    algorithm: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fed: tuple[str, ...]
    loss: str
    states: int
    initialized: int
    twice: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt merge --training-info --json`` prints."""
        return {"format": "gopt-merge/1"} | to_document(self)


def merge_training_info(
    path: str | os.PathLike[str], model: str | os.PathLike[str], *, outputs: Sequence[str] = (), force: bool = False
) -> TrainingInfo:
    """Write a folder, a checkpoint or a step as a model with ``training_info``.

    ``outputs``: of the inference graph; none: the step's outputs beside loss and states. Raises OptionError for a loss
    changed by evaluation; UnsupportedError for a collective; InputError for a state without a value; else as
    ``forward_only`` and ``merge``."""
    target = resolve_output(model)
    check_model(target, shown=Path(model), force=force)
    source = step_at(path)
    training = source.training
    parts = divide(training, forward_only(training, outputs))
    graph = training_model(training, parts, source.startup)
    data = save_model(target, graph, Path(model), force=force)
    (info,) = graph.header.training_info
    stored = sum(initializer.nbytes for initializer in graph.initializers.values())
    stored += sum(training.graph.initializers[entry.name].nbytes for entry in info.algorithm.initializer)
    return TrainingInfo(
        str(Path(model)), data, stored, len(graph.nodes), len(info.algorithm.node), tuple(graph.inputs),
        tuple(graph.outputs), tuple(entry.name for entry in info.algorithm.input), ", ".join(training.losses),
        len(training.states),
        len(info.initialization_binding), dict(parts.names),
    )  # fmt: skip
