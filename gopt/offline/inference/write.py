"""Ranks, or a step, into a model of the forward alone."""

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


@dataclass(frozen=True, slots=True)
class Inference:
    """Result of ``merge_inference``: the model's inputs and outputs, and the differences from training."""

    model: str
    data: str
    nbytes: int = field(metadata=key("bytes"))
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dropped: tuple[str, ...] = field(metadata=key("dropout"))
    running: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt merge --inference --json`` prints."""
        return {"format": "gopt-merge/1"} | to_document(self)


def merge_inference(
    path: str | os.PathLike[str], model: str | os.PathLike[str], *, outputs: Sequence[str] = (), force: bool = False
) -> Inference:
    """Write the forward of a folder or checkpoint as a model for inference, with the ranks' values; of a step, with the
    step's values.

    ``outputs``: values of the source; none: the source's outputs beside the loss and the states. Raises OptionError,
    UnsupportedError and InputError as ``forward_only``; InputError, RunError as ``merge``."""
    target = resolve_output(model)
    check_model(target, shown=Path(model), force=force)
    forward = forward_only(step_at(path).training, outputs, called=True)
    graph = forward.graph
    data = save_model(target, graph, Path(model), force=force)
    return Inference(
        str(Path(model)), data, sum(initializer.nbytes for initializer in graph.initializers.values()),
        tuple(graph.inputs), tuple(graph.outputs), forward.dropped, forward.running,
    )  # fmt: skip
